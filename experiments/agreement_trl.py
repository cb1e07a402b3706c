"""The gradients of a script and of a trainer of TRL. agreement.py starts this in experiments/.trl.

Both sides get the toy's policy in float64, the same responses, scores, old policy and reference. The last two are the
toy's with noise, so that ratios leave the clip range on both sides. The gradients of all parameters are compared as
one vector. TRL's is that of its trainer's train(), for a step of two micro-batches. Sampling is replaced by our
responses, and between scoring and update the weights change from the old policy to the new one.
"""

import copy
import importlib
import json
import sys
import tempfile

import datasets
import torch
import transformers
import trl.rewards
import tyro
import yaml
from common import ROOT, versions

import grpo

K = 8  # responses to a prompt
# One group with equal scores, one with negative ones
SCORES = [[0, 0, 1, 0, 1, 0, 0, 1], [0.25] * K, [-1, 2, 0.5, 0, 3, -0.5, 1, 1], [0, 0, 0, 0, 0, 0, 0, 1]]
SETTINGS = {
    "max_steps": 1,
    "gradient_accumulation_steps": 2,
    "max_grad_norm": 0.0,
    "gradient_checkpointing": False,
}
SETTINGS |= {"use_cpu": True, "bf16": False, "report_to": "none", "save_strategy": "no", "disable_tqdm": True}


def gradient(model):
    """All gradients as one vector."""
    return torch.cat([x.grad.flatten() for x in model.parameters() if x.grad is not None])


def trl_gradient(trainer, config, model, tokenizer, rows, **options):
    """What a trainer has when it calls its optimizer."""
    gradients = []

    class Take(transformers.TrainerCallback):
        def on_pre_optimizer_step(self, *args, model, **kwargs):
            gradients.append(gradient(model))

    options |= {"train_dataset": datasets.Dataset.from_list(rows), "processing_class": tokenizer}
    model = copy.deepcopy(model)
    model.zero_grad()
    with tempfile.TemporaryDirectory() as folder:
        config.output_dir = folder
        trainer(model=model, args=config, callbacks=[Take()], **options).train()
    return gradients[0]


def policy_gradients(script, module, args, trainer, config, options, models, tokenizer):
    """Both gradients of a policy script, for K responses to each of 4 prompts."""
    new, old, ref = models
    prompts = [json.loads(line)["prompt"] for line in (ROOT / "toy" / "train.jsonl").open()][:4]
    ids = [tokenizer(prompt)["input_ids"] for prompt in prompts]
    data = grpo.generate(old, tokenizer, ids, grpo.Args(), K)
    data["scores"] = torch.tensor(SCORES).double().flatten()
    if script == "maxrl":  # which takes no negative scores
        data["scores"] = (data["scores"] > 0).double()
    if script in ("rloo", "maxrl"):  # one step per rollout: the policy is the one that sampled
        old = new
    with torch.no_grad():
        data["old_logprobs"] = grpo.token_logprobs(old, data, 1.0)
        data["ref_logprobs"] = grpo.token_logprobs(ref, data, 1.0)
    data["kl"] = data["old_logprobs"] - data["ref_logprobs"]
    data |= module.compute_advantages(args, data)
    mask = data["response_mask"]
    loss, _ = module.policy_loss(args, data, module.token_logprobs(new, data, 1.0), len(mask), mask.sum())
    loss.backward()

    texts = data["sequences"][:, -mask.shape[1] :]
    responses = [text[row].tolist() for text, row in zip(texts, mask)]

    class Trainer(trainer):
        def _generate_single_turn(self, *inputs):
            return (responses, None) if trainer is trl.GRPOTrainer else responses

        def _generate_and_score_completions(self, inputs):
            if self.ref_model:
                self.ref_model.load_state_dict(ref.state_dict())
            self.model.load_state_dict(old.state_dict())
            output = super()._generate_and_score_completions(inputs)
            self.model.load_state_dict(new.state_dict())
            return output

    rewards = [lambda **columns: data["scores"].tolist()]
    if "reward_funcs" in options:
        rewards.append(trl.rewards.get_soft_overlong_punishment(40, 30))
        del options["reward_funcs"]
    # num_iterations 2: the log-probs of the old policy are taken before the update.
    options |= {"num_generations": K, "num_iterations": 2, "shuffle_dataset": False}
    config = config(per_device_train_batch_size=2 * K, **SETTINGS, **options)
    rows = [{"prompt": prompt} for prompt in prompts]
    return gradient(new), trl_gradient(Trainer, config, new, tokenizer, rows, reward_funcs=rewards)


def offline_gradients(script, module, args, trainer, config, options, models, tokenizer):
    """Both gradients of sft.py, dpo.py or reward_model.py on the first 8 rows of the toy's data."""
    model, _, ref = models
    rows = [json.loads(line) for line in (ROOT / args.dataset).open()][:8]
    # TRL joins prompt and response as texts, the scripts as ids.
    names = ["completion"] if script == "sft" else ["chosen", "rejected"]
    its_rows = [{"prompt": row["prompt"]} | {name: " " + row[name] for name in names} for row in rows]
    others = {}
    if script == "sft":
        rows = [module.encode(tokenizer, row) for row in rows]
        [(_, batch)] = module.micro_batches(rows, range(8), 8, "cpu")
        num_tokens = sum(sum(row["completion_mask"]) for row in rows)
        loss = module.completion_loss(model, batch, num_tokens)
    elif script == "dpo":
        others["ref_model"] = ref
        rows = module.load_rows(args, "dataset", args.dataset, "train", model, tokenizer)[:8]
        [(_, batch)] = module.micro_batches(rows, range(8), 8, "cpu")
        with torch.no_grad():
            ref_logprobs = module.response_logprobs(ref, batch)
        loss = module.dpo_loss(*module.response_logprobs(model, batch), *ref_logprobs, args.beta, 8)
    else:
        load = transformers.AutoModelForSequenceClassification.from_pretrained
        model = load(ROOT / "toy" / "reward_model", dtype=torch.float64).eval()
        rows = module.load_rows(args, "dataset", args.dataset, "train", model, tokenizer)[:8]
        [(_, batch)] = module.micro_batches(rows, range(8), 8, "cpu")
        scores = module.score(args, model, batch)
        loss = module.preference_loss(*scores, center=args.center_rewards_coefficient, num_pairs=8)
    loss.backward()
    config = config(per_device_train_batch_size=4, **SETTINGS, **options)
    return gradient(model), trl_gradient(trainer, config, model, tokenizer, its_rows, **others)


def main(script, flags, trainer, *trl_flags):
    transformers.utils.logging.set_verbosity_error()
    torch.manual_seed(0)
    path = ROOT / "toy" / "policy"
    tokenizer = transformers.AutoTokenizer.from_pretrained(path, padding_side="left")
    models = []
    for noise in (0.0, 0.02, 0.015):  # the new policy, the old one and the reference
        models.append(transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64).eval())
        for x in models[-1].parameters():
            x.data += noise * torch.randn_like(x)
    module = importlib.import_module(script)
    args = tyro.cli(module.Args, args=flags.split(), use_underscores=True)
    # Numbers and booleans become what they are, other values stay text.
    options = {key: yaml.safe_load(value) for key, value in (flag.split("=") for flag in trl_flags)}
    config = getattr(trl, trainer.replace("Trainer", "Config"))
    both = offline_gradients if script in ("sft", "dpo", "reward_model") else policy_gradients
    a, b = both(script, module, args, getattr(trl, trainer), config, options, models, tokenizer)
    outcome = {"cosine": float(a @ b / a.norm() / b.norm()), "difference": float((a - b).norm() / a.norm())}
    print(json.dumps(outcome | {"versions": versions("trl")}))


if __name__ == "__main__":
    main(*sys.argv[1:])
