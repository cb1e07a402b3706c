# ruff: noqa: E402
"""The gradients of the scripts and of the frameworks. agreement.py starts this in experiments/.peers.

Both sides get the toy's policy in float64, the same responses, scores, old policy and reference. The last two are the
toy's with noise, so that ratios leave the clip range on both sides. One group has equal scores, one negative ones.
The gradients of all parameters, and for ppo of the values, are compared as one vector. What runs of a framework:

    TRL         train() of its trainer, for a step of two micro-batches. Sampling is replaced by our responses. Between
                scoring and update the weights change from the old policy to the new one. Advantages are float32
    verl        on our log-probs: apply_kl_penalty, compute_advantage, ppo_loss, value_loss, distillation_ppo_loss
    OpenRLHF    on our log-probs: compute_advantages_and_returns, and training_step of actor and critic. The KL is
                float32. Engines such as Ray and vLLM are not installed for verl and OpenRLHF, and nothing of them runs
"""

import copy
import importlib.abc
import importlib.metadata
import inspect
import json
import sys
import tempfile
import types
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from unittest import mock

import datasets
import torch
import transformers
import trl.rewards
import trl.trainer.grpo_trainer
import tyro
from agreement import NOTES
from common import ROOT
from omegaconf import OmegaConf
from tensordict import NonTensorData

import grpo

# What verl and OpenRLHF import and the functions that run here do not need
ENGINES = "aiohttp cachetools codetiming deepspeed fastapi flash_attn peft PIL pylatexenc ray torchdata uvicorn vllm"


class StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Empty modules in place of engines that are not installed."""

    def find_spec(self, name, *rest):
        return ModuleSpec(name, self, is_package=True) if name.split(".")[0] in ENGINES.split() else None

    def create_module(self, spec):
        return mock.MagicMock()

    def exec_module(self, module):
        pass


sys.meta_path.append(StandIns())
from openrlhf.models import PolicyLoss, ValueLoss
from openrlhf.models import utils as openrlhf_utils
from openrlhf.trainer.ppo_utils import Experience, experience_maker
from openrlhf.trainer.ray import ppo_actor, ppo_critic
from verl import DataProto
from verl.trainer.config import AlgoConfig
from verl.trainer.distillation import losses as verl_distillation
from verl.trainer.ppo import core_algos, ray_trainer
from verl.workers.config import ActorConfig, DistillationLossConfig
from verl.workers.utils import losses as verl_losses

K = 8  # responses per prompt
ONE_STEP = "reinforce", "rloo", "remax", "maxrl", "distill"  # per rollout
OPENRLHF_DEFAULTS = """--algo.advantage.gamma 1 --algo.advantage.lambd 1 --algo.advantage.no_std_norm false
--algo.kl.init_coef 0.01 --algo.kl.estimator k1 --algo.kl.use_loss false --algo.kl.unbiased_gradient false
--actor.policy_loss_type ppo --actor.loss_agg_mode token-mean --actor.eps_clip_low_high 0.2 0.2
--actor.entropy_coef null --actor.aux_loss_coef 0 --critic.value_clip 0.5 --reward.clip_range -10 10
--reward.overlong_penalty_factor 1 --rollout.n_samples_per_prompt 8 --rollout.max_new_tokens 40
--train.dynamic_batch_enable false"""


def config_of(text):
    """Flags as a config: `--a.b 1 2 --c` of OpenRLHF, or `a.b=1` of the others."""
    if text.startswith("--"):
        words = [part.split() for part in text.split("--")[1:]]
        values = {key: ",".join(rest) or "true" for key, *rest in words}
        text = " ".join(f"{key}=[{x}]" if "," in x else f"{key}={x}" for key, x in values.items())
    return OmegaConf.from_dotlist(text.split())


@contextmanager
def replaced(edits):
    """Replace lines of loaded modules for a while. edits are (module:function, line, other line)."""
    sources = {}
    for where, line, other in edits:
        module = sys.modules[where.partition(":")[0]]
        header = f"def {where.replace(':', '.').rpartition('.')[2]}("
        before, _, after = sources.get(module, inspect.getsource(module)).partition(header)
        assert line in after, f"{where} has no line: {line}"
        sources[module] = before + header + after.replace(line, other, 1)
    for module, source in sources.items():
        exec(compile(source, module.__file__, "exec"), vars(module))
    try:
        yield
    finally:
        for module in sources:
            importlib.reload(module)


def make_data():
    """Models by name, tokenizer, prompts, and a rollout of 4 prompts x 8 responses of the old policy."""
    torch.manual_seed(0)
    path = ROOT / "toy" / "policy"
    tokenizer = transformers.AutoTokenizer.from_pretrained(path, padding_side="left")
    models = {}
    for name, noise in {"new": 0.0, "old": 0.02, "ref": 0.015}.items():
        models[name] = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64).eval()
        for x in models[name].parameters():
            x.data += noise * torch.randn_like(x)
    prompts = [json.loads(line)["prompt"] for line in (ROOT / "toy" / "train.jsonl").open()][:4]
    ids = [tokenizer(prompt)["input_ids"] for prompt in prompts]
    rollout = grpo.generate(models["old"], tokenizer, ids, grpo.Args(), K)
    scores = [[0, 0, 1, 0, 1, 0, 0, 1], [0.25] * 8, [-1, 2, 0.5, 0, 3, -0.5, 1, 1], [0] * 7 + [1]]
    data = {name: rollout[name] for name in ("sequences", "attention_mask", "response_mask")}
    data["scores"] = torch.tensor(scores).double().flatten()
    data["greedy_scores"] = torch.full((4 * K,), 0.5).double()
    values = torch.rand(2, *data["response_mask"].shape).double() * data["response_mask"]
    data |= {"values": values[0], "new_values": values[1].requires_grad_()}
    with torch.no_grad():
        for key, name in {"old_logprobs": "old", "ref_logprobs": "ref", "new_logprobs": "new"}.items():
            data[key] = grpo.token_logprobs(models[name], data, 1.0)
    return models, tokenizer, prompts, data


def gradient(model, *others):
    """All gradients as one vector. Clears them."""
    leaves = [x for x in [*model.parameters(), *others] if x.grad is not None]
    vector = torch.cat([x.grad.flatten() for x in leaves])
    for x in leaves:
        x.grad = None
    return vector


def ours(script, flags, models, data):
    """compute_advantages, token_logprobs and policy_loss of a script, in two micro-batches."""
    module = importlib.import_module(script)
    args = tyro.cli(module.Args, args=flags.split(), use_underscores=True)
    counts = len(data["scores"]), data["response_mask"].sum()
    rollout = data | module.compute_advantages(args, data)
    for _, mb in module.micro_batches(rollout, torch.arange(counts[0]), counts[0] // 2):
        logprobs = module.token_logprobs(models["new"], mb, args.temperature)
        loss, _ = module.policy_loss(args, mb, logprobs, *counts)
        if script == "ppo":
            loss = loss + module.value_loss(args, mb, mb["new_values"], counts[1])[0]
        loss.backward()
    return gradient(models["new"], data["new_values"])


def verl(flags, models, data):
    config, mask, rows = config_of(flags), data["response_mask"], torch.arange(len(data["scores"]))
    algorithm = AlgoConfig(**OmegaConf.to_container(config.algorithm))
    actor = OmegaConf.to_container(config.get("actor", OmegaConf.create()))
    token_scores = torch.zeros_like(data["old_logprobs"])
    token_scores[rows, mask.sum(1) - 1] = data["scores"]
    tensors = {"response_mask": mask.long(), "token_level_scores": token_scores, "values": data["values"]}
    tensors |= {"old_log_probs": data["old_logprobs"], "ref_log_prob": data["ref_logprobs"]}
    tensors |= {"reward_baselines": data["greedy_scores"], "token_level_rewards": token_scores.clone()}
    batch = DataProto.from_dict(tensors, {"uid": (rows // K).numpy()})
    if algorithm.use_kl_in_reward:
        controller = core_algos.FixedKLController(algorithm.kl_ctrl["kl_coef"])
        batch, _ = ray_trainer.apply_kl_penalty(batch, controller)
    options = {"norm_adv_by_std_in_grpo": algorithm.norm_adv_by_std_in_grpo, "config": algorithm}
    options |= {"gamma": algorithm.gamma, "lam": algorithm.lam, "num_repeat": K}
    batch = ray_trainer.compute_advantage(batch, algorithm.adv_estimator, **options).batch
    counts = {"dp_size": 1, "batch_num_tokens": int(mask.sum()), "global_batch_size": len(rows)}
    batch.update({key: NonTensorData(x) for key, x in counts.items()})
    policy_loss = {"loss_mode": actor.pop("policy_loss", {}).get("loss_mode", "vanilla")}
    actor = ActorConfig(strategy="fsdp", rollout_n=K, use_dynamic_bsz=True, policy_loss=policy_loss, **actor)
    logprobs = grpo.token_logprobs(models["new"], data, 1.0)
    outputs = {"log_probs": logprobs}
    padded = {"no_padding_2_padding": lambda x, data: x}  # ours are padded already
    with mock.patch.multiple(verl_losses, **padded), mock.patch.multiple(verl_distillation, **padded):
        if "distillation" in config:  # the reference is the teacher
            batch["teacher_logprobs"] = data["ref_logprobs"]
            loss = DistillationLossConfig(**config.distillation.distillation_loss)
            distillation = types.SimpleNamespace(distillation_loss=loss)
            verl_distillation.distillation_ppo_loss(actor, distillation, outputs, batch)[0].backward()
        else:
            verl_losses.ppo_loss(actor, outputs, batch)[0].backward()
        if algorithm.adv_estimator == "gae":
            rest = {"loss_agg_mode": "token-mean", "loss_scale_factor": None}
            critic = types.SimpleNamespace(**config.critic, **rest)
            verl_losses.value_loss(critic, {"values": data["new_values"]}, batch)[0].backward()
    return gradient(models["new"], data["new_values"])


def openrlhf(flags, models, data):
    args, mask = OmegaConf.merge(config_of(OPENRLHF_DEFAULTS), config_of(flags)), data["response_mask"]
    options, old, ref = args.algo.kl, data["old_logprobs"], data["ref_logprobs"]
    strategy, coef = mock.MagicMock(args=args), types.SimpleNamespace(value=options.init_coef)
    strategy.backward = lambda loss, *rest: loss.backward()
    maker = experience_maker.RemoteExperienceMaker(None, None, None, None, coef, strategy, None)
    kl = openrlhf_utils.compute_approx_kl(old, ref, kl_estimator=options.estimator) * (not options.use_loss)
    tensors = {"action_mask": mask, "action_log_probs": old, "base_action_log_probs": ref, "kl": kl}
    tensors |= {"values": data["values"], "rewards": data["scores"].clone(), "response_length": mask.sum(1)}
    experience = Experience(**tensors, index=list(range(len(mask))))
    maker.compute_advantages_and_returns([experience])
    logprobs = grpo.token_logprobs(models["new"], data, 1.0)
    trainer = mock.MagicMock(args=args, strategy=strategy, aux_loss=False, ema_model=None)
    trainer.actor.return_value, trainer.critic.return_value = (logprobs, None), (data["new_values"], None)
    token_level, clip = args.actor.loss_agg_mode == "token-mean", args.actor.eps_clip_low_high
    trainer.actor_loss_fn = PolicyLoss(*clip, None, token_level, args.actor.policy_loss_type)
    trainer.critic_loss_fn = ValueLoss(args.critic.value_clip)
    ppo_actor.ActorPPOTrainer.training_step(trainer, experience, options.init_coef, 0)
    if args.algo.advantage.estimator == "gae":
        ppo_critic.CriticPPOTrainer.training_step(trainer, experience, 0)
    return gradient(models["new"], data["new_values"])


def trl_step(trainer, config, model, tokenizer, rows, size, **options):
    """The gradient that a trainer has when it calls its optimizer, after two micro-batches."""
    gradients = []

    class Take(transformers.TrainerCallback):
        def on_pre_optimizer_step(self, *args, model, **kwargs):
            gradients.append(gradient(model))

    settings = {key: options.pop(key) for key in list(options) if key in config.__dataclass_fields__}
    settings |= {"max_steps": 1, "per_device_train_batch_size": size // 2, "gradient_accumulation_steps": 2}
    settings |= {"max_grad_norm": 0.0, "bf16": False, "use_cpu": True, "gradient_checkpointing": False}
    settings |= {"report_to": "none", "save_strategy": "no", "logging_strategy": "no", "disable_tqdm": True}
    options |= {"train_dataset": datasets.Dataset.from_list(rows), "processing_class": tokenizer}
    with tempfile.TemporaryDirectory() as folder:
        model, args = copy.deepcopy(model), config(output_dir=folder, **settings)
        trainer(model=model, args=args, callbacks=[Take()], **options).train()
    return gradients[0]


def trl_policy(name, options, models, tokenizer, prompts, data):
    """GRPOTrainer or RLOOTrainer on our responses."""
    lengths, length = data["response_mask"].sum(1).tolist(), data["response_mask"].shape[1]
    responses = [row[-length:][:n].tolist() for row, n in zip(data["sequences"], lengths)]

    class Trainer(getattr(trl.trainer.grpo_trainer if name == "GRPOTrainer" else trl, name)):
        def _generate_single_turn(self, prompt_ids, *rest):
            assert prompt_ids == [tokenizer(prompt)["input_ids"] for prompt in prompts for _ in range(K)]
            return (responses, None) if name == "GRPOTrainer" else responses

        def _generate_and_score_completions(self, inputs):
            if self.ref_model:
                self.ref_model.load_state_dict(models["ref"].state_dict())
            self.model.load_state_dict(models["old"].state_dict())
            output = super()._generate_and_score_completions(inputs)
            self.model.load_state_dict(models["new"].state_dict())
            return output

    rewards = [lambda **columns: data["scores"].tolist()]
    if "reward_funcs" in options:
        rewards.append(trl.rewards.get_soft_overlong_punishment(40, 30))
    # num_iterations 2: the log-probs of the old policy are taken before the update
    options |= {"num_generations": K, "num_iterations": 2, "shuffle_dataset": False, "reward_funcs": rewards}
    config, rows = getattr(trl, name.replace("Trainer", "Config")), [{"prompt": prompt} for prompt in prompts]
    return trl_step(Trainer, config, models["new"], tokenizer, rows, len(responses), **options)


def offline(script, flags, name, options, models, tokenizer):
    """Both gradients of sft.py, dpo.py or reward_model.py on the first eight rows of the toy's data."""
    module, model = importlib.import_module(script), models["new"]
    args = tyro.cli(module.Args, args=flags.split(), use_underscores=True)
    args.micro_batch_size = 4
    if script == "sft":
        texts, rows = ["completion"], [json.loads(line) for line in (ROOT / args.dataset).open()][:8]
    else:
        texts = ["chosen", "rejected"]
        rows = module.load_rows(args, "dataset", args.dataset, "train", model, tokenizer)[:8]
    if script == "reward_model":
        load = transformers.AutoModelForSequenceClassification.from_pretrained
        model = load(ROOT / "toy" / "reward_model", dtype=torch.float64).eval()
    if script == "dpo":
        options["ref_model"] = models["ref"]
    # TRL joins prompt and response as texts, the scripts as ids
    its_rows = [{"prompt": row["prompt"]} | {key: " " + row[key] for key in texts} for row in rows]
    trainer, config = getattr(trl, name), getattr(trl, name.replace("Trainer", "Config"))
    theirs = trl_step(trainer, config, model, tokenizer, its_rows, 8, **options)

    if script == "sft":
        rows = [module.encode(tokenizer, row, "") for row in rows]
        num_tokens = sum(sum(row["completion_mask"]) for row in rows)
        for batch in module.micro_batches(rows, 4, "cpu"):
            module.completion_loss(model, batch, num_tokens).backward()
    elif script == "dpo":
        for batch in module.micro_batches(args, rows, "cpu"):
            with torch.no_grad():
                ref_logprobs = module.response_logprobs(models["ref"], batch)
            logprobs = module.response_logprobs(model, batch)
            module.dpo_loss(*logprobs, *ref_logprobs, args.beta, 8).backward()
    else:
        for batch in module.micro_batches(args, rows):
            scores = module.score(model, batch["texts"]).chunk(2)
            module.preference_loss(*scores, center=args.center_rewards_coefficient, num_pairs=8).backward()
    return gradient(model), theirs


def measure(script, flags, peer, peer_flags, models, tokenizer, prompts, data):
    """Cosine and relative difference of both gradients."""
    if script in ONE_STEP:  # the policy is the one that sampled
        data, models = data | {"old_logprobs": data["new_logprobs"]}, models | {"old": models["new"]}
    if script == "maxrl":  # which takes no negative scores
        data = data | {"scores": (data["scores"] > 0).double()}
    data = data | {"kl": data["old_logprobs"] - data["ref_logprobs"]}
    if peer == "TRL":
        name, _, text = peer_flags.partition(" ")
        options = OmegaConf.to_container(config_of(text))
    if script in ("sft", "dpo", "reward_model"):
        a, b = offline(script, flags, name, options, models, tokenizer)
    else:
        a = ours(script, flags, models, data)
        if peer == "TRL":
            b = trl_policy(name, options, models, tokenizer, prompts, data)
        else:
            b = {"verl": verl, "OpenRLHF": openrlhf}[peer](peer_flags, models, data)
    return {"cosine": float(a @ b / a.norm() / b.norm()), "difference": float((a - b).norm() / a.norm())}


def main():
    transformers.utils.logging.set_verbosity_error()
    data, runs = make_data(), json.loads(sys.argv[1])
    responses, mask = data[-1], data[-1]["response_mask"]
    ratio = (responses["new_logprobs"] - responses["old_logprobs"])[mask].exp()
    clipped = f"{(ratio < 0.8).sum()} with a ratio below 0.8, {(ratio > 1.2).sum()} above 1.2"
    for run in runs:
        case = [run[key] for key in ("script", "flags", "peer", "peer_flags")]
        run |= measure(*case, *data)
        if run["note"]:
            with replaced(NOTES[run["peer"], run["note"]]):
                run["then"] = measure(*case, *data)["difference"]
    names = ["torch", "transformers", "trl", "verl", "openrlhf"]
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in names)
    made = {"versions": versions, "data": f"{len(mask)} responses, {len(ratio)} tokens, {clipped}"}
    print(json.dumps({"made": made, "runs": runs}))


if __name__ == "__main__":
    main()
