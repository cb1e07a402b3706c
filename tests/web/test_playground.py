"""web/estimators.mjs, the estimators of the page Playground, against the scripts."""

import importlib
import json
import re
import subprocess

import numpy as np
import pytest
from adapters import ours
from conftest import ROOT
from make_vectors import make_rollout

pytestmark = pytest.mark.web
# A port to JavaScript is optional.
PORTS = re.findall(r"^function (\w+)\(batch\)", (ROOT / "web" / "estimators.mjs").read_text(), re.MULTILINE)
LENGTH = 8  # of the longest response, so that the penalty of dapo.py acts
PROGRAM = """
import { readFileSync } from "node:fs";
import { batchOf, ESTIMATORS, PRESETS } from "./estimators.mjs";
const batches = JSON.parse(readFileSync(0, "utf8"));
for (const [name, { group }] of Object.entries(PRESETS)) batches[name] = batchOf(group);
const results = {};
for (const [script, estimate] of Object.entries(ESTIMATORS)) {
  results[script] = {};
  for (const [name, batch] of Object.entries(batches)) results[script][name] = estimate(batch);
}
process.stdout.write(JSON.stringify(results));
"""


def random_rollout(seed: int) -> dict:
    """Six responses to one prompt, to two or to three; every fourth time with equal scores."""
    rollout = make_rollout(str(seed), (2, 3, 6)[seed % 3], (0.05, 0.8)[seed % 2], 0.0, False, 1)
    if seed % 4 == 3:
        rollout["scores"] = [0.5] * 6
    return {key: np.array(x) if isinstance(x, list) else x for key, x in rollout.items()}


ROLLOUTS = {str(seed): random_rollout(seed) for seed in range(60)}


def batch_of(rollout: dict) -> dict:
    """A rollout in the form of estimators.mjs."""
    responses = []
    for i, length in enumerate(rollout["response_mask"].sum(1)):
        names = {"old": "old_logprobs", "ref": "ref_logprobs", "teacher": "ref_logprobs", "values": "values"}
        response = {key: rollout[name][i, :length].tolist() for key, name in names.items()}
        ratios = rollout["new_logprobs"][i] - rollout["old_logprobs"][i]
        response |= {"logRatios": ratios[:length].tolist(), "reward": rollout["scores"][i]}
        responses.append(response | {"greedy": rollout["greedy_scores"][i]})
    return {"k": rollout["samples_per_prompt"], "maxLength": LENGTH, "responses": responses}


@pytest.fixture(scope="module")
def computed():
    """What each function of estimators.mjs returns for each rollout and each preset, by one call of Node."""
    batches = json.dumps({name: batch_of(rollout) for name, rollout in ROLLOUTS.items()})
    command = ["node", "--input-type=module", "--eval", PROGRAM]
    options = {"cwd": ROOT / "web", "stdout": subprocess.PIPE, "text": True, "check": True}
    return json.loads(subprocess.run(command, input=batches, **options).stdout)


@pytest.mark.parametrize("name", PORTS)
def test_javascript_computes_what_the_script_does(name, computed):
    """Advantages and the gradient of the loss."""
    script = importlib.import_module(name)
    for seed, rollout in ROLLOUTS.items():
        result, mask = computed[name][seed], rollout["response_mask"].astype(bool)
        flags = vars(
            script.Args(samples_per_prompt=rollout["samples_per_prompt"], max_response_length=LENGTH)
        )
        expected = ours(script)({**rollout, **flags})
        for key, sign in (("advantages", 1), ("gradient", -1)):
            found = np.concatenate(result["weights" if key == "gradient" else key])
            assert found == pytest.approx(sign * expected[key][mask].numpy(), rel=1e-6, abs=1e-9)


def test_the_ratios_that_a_preset_names(computed):
    def pushes(preset, script):
        """On A1 to A8 and B1 to B8, each as a whole."""
        return [sum(weights) for weights in computed[script][preset]["weights"]]

    for script in ("grpo", "gspo", "sapo"):  # A8 and B1 have 3 times the tokens of the others
        A7, A8, B1, B2 = pushes("length", script)[6:10]
        assert (A8, B1) == pytest.approx((A7, B2))
    A1, *others = pushes("success", "grpo")
    assert others == pytest.approx([-A1 / 7] * 7 + [0] * 8)
    sizes = [abs(push) for push in pushes("prompts", "maxrl")]
    assert sum(sizes[8:]) == pytest.approx(3.5 * sum(sizes[:8]))
