"""Functions for check.py's report: our scripts, the trainers of TRL and the functions of verl. Each imports its own."""

import inspect
import json
import tempfile
from types import SimpleNamespace

import torch
from check import FOLDER


def ours(script):
    """A script, as a module."""

    def function(case):
        flags = {key: x.tolist() if hasattr(x, "tolist") else x for key, x in case.items()}
        args, rollout = SimpleNamespace(**flags), tensors_of(case)
        mask = rollout["response_mask"]
        rollout = {key: x * mask if x.shape == mask.shape else x for key, x in rollout.items()}
        rollout |= script.compute_advantages(args, rollout)
        new = rollout["new_logprobs"].requires_grad_()
        loss, _ = script.policy_loss(args, rollout, new, case["num_sequences"], case["num_tokens"])
        (gradient,) = torch.autograd.grad(loss, new)
        return {"advantages": rollout["advantages"], "loss": loss.item(), "gradient": gradient}

    return function


def tensors_of(case: dict) -> dict:
    """The arrays of a case as tensors, and the KL."""
    tensors = {key: torch.as_tensor(x) for key, x in case.items() if hasattr(x, "shape")}
    tensors["response_mask"] = tensors["response_mask"].bool()
    return tensors | {"kl": tensors["old_logprobs"] - tensors["ref_logprobs"]}


def results(case: dict, advantages, loss, new) -> dict:
    """What a framework computed, without the loss on policy: with a ratio in place of the log-prob it is another
    number with the same gradient."""
    (gradient,) = torch.autograd.grad(loss, new)
    found = {"advantages": advantages, "gradient": gradient}
    is_on_policy = (case["new_logprobs"] == case["old_logprobs"]).all()
    return found if is_on_policy else found | {"loss": loss.item()}


def options_of(flags: str, case: dict) -> dict:
    """Flags such as beta={kl_coef}, with the numbers of the case. What is JSON is read, the rest is text."""
    options = {}
    for flag in flags.format(**case).split():
        key, value = flag.split("=")
        try:
            options[key] = json.loads(value.lower())
        except json.JSONDecodeError:
            options[key] = value
    return options


def trl(flags: str):
    """A trainer of TRL, which gets the log-probs of the case in place of its models'."""
    import datasets
    import transformers
    import trl
    from trl.rewards import get_soft_overlong_punishment

    name, _, flags = flags.partition(" ")
    path = FOLDER.parent / "toy" / "policy"
    tokenizer = transformers.AutoTokenizer.from_pretrained(path, padding_side="left")

    def function(case):
        tensors, parts = tensors_of(case), case["num_sequences"] // 6
        mask, new = tensors["response_mask"], tensors["new_logprobs"].requires_grad_()
        responses = [[5] * (1 + max(row.nonzero()).item()) for row in mask]

        class Trainer(getattr(trl, name)):
            def _generate_single_turn(self, *inputs):
                return (responses, None) if name == "GRPOTrainer" else responses

            def _get_per_token_logps_and_entropies(self, model, *inputs, **options):
                if torch.is_grad_enabled():
                    logprobs = new
                else:
                    logprobs = tensors["old_logprobs" if model is self.model else "ref_logprobs"]
                return logprobs, torch.zeros(mask.shape), None

        options = options_of(flags, case)
        rewards = [lambda **columns: tensors["scores"].tolist()]
        if options.pop("reward_funcs", None):
            rewards.append(get_soft_overlong_punishment(case["max_response_length"], case["overlong_buffer"]))
        options |= {"num_generations": case["samples_per_prompt"], "num_iterations": 2, "use_cpu": True}
        options |= {"per_device_train_batch_size": 6, "bf16": False, "report_to": "none"}
        rows = [{"prompt": "3 + 5 ?"}] * 6
        with tempfile.TemporaryDirectory() as folder:
            config = getattr(trl, name.replace("Trainer", "Config"))(output_dir=folder, **options)
            model = transformers.AutoModelForCausalLM.from_pretrained(path)
            data = {"train_dataset": datasets.Dataset.from_list(rows), "processing_class": tokenizer}
            trainer = Trainer(model=model, args=config, reward_funcs=rewards, **data)
        trainer.model.train()
        trainer.current_gradient_accumulation_steps = trainer.args.steps_per_generation = parts
        batch = trainer._generate_and_score_completions(rows)
        batch |= {"tool_mask": mask.long(), "num_items_in_batch": torch.tensor(case["num_tokens"])}
        loss = trainer._compute_loss(trainer.model, batch)
        if name == "RLOOTrainer":  # whose loss Trainer divides
            loss = loss / parts
        return results(case, batch["advantages"], loss, new)

    return function


def verl(flags: str):
    """The functions of verl for advantages, loss and KL, called as its trainer does."""
    from verl.trainer.config import AlgoConfig
    from verl.trainer.ppo.core_algos import agg_loss, get_adv_estimator_fn, get_policy_loss_fn, kl_penalty
    from verl.workers.config import ActorConfig

    def function(case):
        tensors, options = tensors_of(case), options_of(flags, case)
        mask, new = tensors["response_mask"].long(), tensors["new_logprobs"].requires_grad_()
        estimator, loss_mode = options.pop("adv_estimator"), options.pop("loss_mode", "vanilla")
        by_std, lam = options.pop("norm_adv_by_std_in_grpo", True), options.pop("lam", 1.0)
        token_rewards = -options.pop("kl_ctrl.kl_coef", 0.0) * tensors["kl"] * mask
        for row, row_mask, score in zip(token_rewards, mask, tensors["scores"]):
            row[row_mask.nonzero()[-1]] += score
        inputs = {"token_level_rewards": token_rewards, "response_mask": mask, "values": tensors["values"]}
        inputs |= {"index": torch.arange(6).numpy() // case["samples_per_prompt"], "gamma": 1.0, "lam": lam}
        inputs |= {"norm_adv_by_std_in_grpo": by_std, "reward_baselines": tensors["greedy_scores"]}
        inputs["config"] = AlgoConfig()
        estimate = get_adv_estimator_fn(estimator)
        wanted = inspect.signature(estimate).parameters
        advantages, _ = estimate(**{key: x for key, x in inputs.items() if key in wanted})

        config = ActorConfig(strategy="fsdp", rollout_n=6, ppo_micro_batch_size_per_gpu=6, **options)
        counts = {"global_batch_size": case["num_sequences"], "batch_num_tokens": case["num_tokens"]}
        config.global_batch_info.update(counts, dp_size=1, loss_scale_factor=config.loss_scale_factor)
        mode, batch = config.loss_agg_mode, (tensors["old_logprobs"], new, advantages, mask)
        loss, _ = get_policy_loss_fn(loss_mode)(*batch, mode, config)
        if config.use_kl_loss:
            kl = kl_penalty(new, tensors["ref_logprobs"], config.kl_loss_type)
            loss = loss + config.kl_loss_coef * agg_loss(kl, mask, mode, **config.global_batch_info)
        return results(case, advantages, loss, new)

    return function
