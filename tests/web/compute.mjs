// Reads rollouts of conformance/make_vectors.py by name, and writes what each function of web/estimators.mjs returns
// for each of them. Fails if a preset does not show what it says. test_site.py starts it.
import assert from "node:assert";
import { readFileSync } from "node:fs";
import { batchOf, ESTIMATORS, PRESETS } from "../../web/estimators.mjs";

function batchOfRollout(rollout) {
  const responses = rollout.scores.map((reward, i) => {
    const length = rollout.response_mask[i].filter(Boolean).length;
    const [old, now, ref, values] = ["old_logprobs", "new_logprobs", "ref_logprobs", "values"].map((name) =>
      rollout[name][i].slice(0, length),
    );
    const logRatios = now.map((x, t) => x - old[t]);
    return { reward, greedy: rollout.greedy_scores[i], logRatios, old, ref, teacher: ref, values };
  });
  return { k: rollout.samples_per_prompt, maxLength: rollout.max_response_length, responses };
}

const batches = {};
for (const [name, rollout] of Object.entries(JSON.parse(readFileSync(0, "utf8")))) batches[name] = batchOfRollout(rollout);
const results = {};
for (const [script, estimate] of Object.entries(ESTIMATORS)) {
  results[script] = {};
  for (const [name, batch] of Object.entries(batches)) results[script][name] = estimate(batch);
}

/** The pushes on A1 to A8 and B1 to B8, each as a whole. */
function pushes(preset, script) {
  const { weights } = ESTIMATORS[script](batchOf(PRESETS[preset].group));
  return weights.map((row) => row.reduce((total, x) => total + x, 0));
}
const isNear = (a, b) => assert(Math.abs(a - b) < 1e-6 * Math.abs(b) + 1e-12, `${a} is not ${b}`);
const total = (xs) => xs.reduce((sum, x) => sum + Math.abs(x), 0);

// A8 and B1 have 3 times the tokens of the others.
for (const script of ["grpo", "gspo", "sapo"]) {
  const [A7, A8, B1, B2] = pushes("length", script).slice(6, 10);
  isNear(A8, A7);
  isNear(B1, B2);
}
const [A1, ...others] = pushes("success", "grpo");
others.forEach((push, i) => isNear(push, i < 7 ? -A1 / 7 : 0));
const maxrl = pushes("prompts", "maxrl");
isNear(total(maxrl.slice(8)), 3.5 * total(maxrl.slice(0, 8)));

process.stdout.write(JSON.stringify(results));
