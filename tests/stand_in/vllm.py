"""A stand-in for vLLM. The engine is a model of transformers with random weights, until it receives other weights."""

from types import SimpleNamespace

import torch
import transformers

import grpo

SamplingParams = SimpleNamespace


def with_a_seed(generate):
    """Return a generate() that always draws the same random numbers, and leaves the generator as it was."""

    def seeded(*args, **options):
        with torch.random.fork_rng():
            torch.manual_seed(7)
            return generate(*args, **options)

    return seeded


class LLM:
    def __init__(self, name, **options):
        self.options, self.is_asleep = options, False
        config = transformers.AutoConfig.from_pretrained(name)
        self.model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(name)
        self.llm_engine = SimpleNamespace(engine_core=SimpleNamespace(shutdown=lambda: None))
        self.reset_prefix_cache = lambda: True

    def wake_up(self):
        self.is_asleep = False

    def sleep(self, level):
        """Lose the weights, as level 2 does."""
        self.is_asleep = True
        for weight in self.model.parameters():
            weight.data.fill_(torch.nan)

    def collective_rpc(self, method, kwargs):
        assert not self.is_asleep
        self.model.load_state_dict(dict(kwargs["weights_iterator"]))

    def generate(self, requests, settings, use_tqdm):
        assert not self.is_asleep
        self.settings = settings
        k, heat = settings[0].n, settings[0].temperature
        prompts = [request["prompt_token_ids"] for request in requests]
        args = grpo.Args(max_response_length=settings[0].max_tokens, temperature=heat or 1.0)
        rollout = with_a_seed(grpo.generate)(args, self.model, self.tokenizer, prompts, k, heat == 0)
        mask, outputs = rollout["response_mask"], []
        responses = rollout["sequences"][:, -mask.shape[1] :]
        for i, is_truncated in enumerate(rollout["truncated"]):
            ids, logprobs = responses[i][mask[i]].tolist(), rollout["old_logprobs"][i][mask[i]].tolist()
            steps = [{token: SimpleNamespace(logprob=x)} for token, x in zip(ids, logprobs)]
            reason = "length" if is_truncated else "stop"
            outputs.append(SimpleNamespace(token_ids=ids, logprobs=steps, finish_reason=reason))
        return [SimpleNamespace(outputs=outputs[i : i + k]) for i in range(0, len(outputs), k)]
