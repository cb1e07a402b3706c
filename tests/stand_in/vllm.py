"""Stands in for vLLM: the engine is a model of transformers with random weights until it gets others.

It takes weights under the names of --model only, and samples as grpo.py does, with a seed of its own.
"""

from types import SimpleNamespace

import torch
import transformers

import grpo

SamplingParams = SimpleNamespace


def with_a_seed(generate):
    """generate, but its responses depend on nothing drawn before, nor does anything drawn after depend on it."""

    def seeded(*args, **options):
        with torch.random.fork_rng():
            torch.manual_seed(7)
            return generate(*args, **options)

    return seeded


class LLM:
    def __init__(self, name, **options):
        config = transformers.AutoConfig.from_pretrained(name)
        self.model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(name)
        self.llm_engine = SimpleNamespace(engine_core=SimpleNamespace(shutdown=lambda: None))

    def collective_rpc(self, method, kwargs):
        assert method == "reload_weights"
        self.model.load_state_dict(dict(kwargs["weights_iterator"]))

    def reset_prefix_cache(self):
        return True

    def generate(self, requests, settings, use_tqdm):
        common, prompts = settings[0], [request["prompt_token_ids"] for request in requests]
        args = grpo.Args(max_response_length=common.max_tokens, temperature=common.temperature or 1.0)
        greedy = common.temperature == 0
        rollout = with_a_seed(grpo.generate)(self.model, self.tokenizer, prompts, args, common.n, greedy)
        mask = rollout["response_mask"]
        columns = (
            rollout["sequences"][:, -mask.shape[1] :],
            rollout["old_logprobs"],
            mask,
            rollout["truncated"],
        )
        outputs = []
        for ids, logprobs, row_mask, is_truncated in zip(*columns):
            ids, logprobs = ids[row_mask].tolist(), logprobs[row_mask].tolist()
            steps = [{token: SimpleNamespace(logprob=x)} for token, x in zip(ids, logprobs)]
            reason = "length" if is_truncated else "stop"
            outputs.append(SimpleNamespace(token_ids=ids, logprobs=steps, finish_reason=reason))
        groups = [outputs[i : i + common.n] for i in range(0, len(outputs), common.n)]
        return [SimpleNamespace(outputs=group) for group in groups]
