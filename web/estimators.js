// Estimators of policy scripts in JavaScript, for the page Playground. One function per script, with the script's
// default flags; a script without one has no card there. tests/web/test_site.py compares them with the scripts.
//
// A batch is {k, maxLength, responses}: k responses to each prompt, those of the first prompt first, and one optimizer
// step for all of them. A response is {reward, greedy, logRatios, old, ref, teacher, values}:
//   reward      its score                             greedy   the score of the greedy response to its prompt
//   logRatios   log(pi_theta / pi_old) of each token  old      log pi_old of each token
//   ref         log pi_ref of each token              teacher  the teacher's log-prob of each token
//   values      the critic's value before each token
//
// Each function returns {advantages, weights, clipped}: a list per response, with an entry per token. The weight of a
// token is -d loss / d logprob. clipped is true where the clip stops the gradient of the policy loss. What a clip can
// stop is in stops: "token" or "response"; without it, nothing.

const sum = (xs) => xs.reduce((total, x) => total + x, 0);
const mean = (xs) => sum(xs) / xs.length;
const clamp = (x, low, high) => Math.min(Math.max(x, low), high);

/** f(response, t, i) for token t of response i. */
const eachToken = (batch, f) =>
  batch.responses.map((response, i) => response.logRatios.map((_, t) => f(response, t, i)));

// --- advantages --------------------------------------------------------------------------------------------

/** One number per response becomes a number on each of its tokens. */
const onTokens = (batch, values) => eachToken(batch, (response, t, i) => values[i]);

const rewards = (batch) => batch.responses.map((response) => response.reward);

/** The sum of log(pi_old / pi_ref) from token t to the end of the response. */
const klToGo = ({ old, ref }, t) => sum(old.slice(t).map((x, s) => x - ref[t + s]));

/** The reward of a whole response, with the KL penalty. */
const penalizedRewards = (batch) => batch.responses.map((response) => response.reward - 0.01 * klToGo(response, 0));

/** f(values of the group) for each group of k values, which returns k values. */
function inGroups(batch, values, f) {
  const groups = [];
  for (let first = 0; first < values.length; first += batch.k) groups.push(values.slice(first, first + batch.k));
  return groups.flatMap(f);
}

const allEqual = (xs) => xs.every((x) => x == xs[0]);

/** Each value minus the mean of its group. */
const centered = (batch, values) => inGroups(batch, values, (group) => group.map((x) => x - mean(group)));

/** Each value minus the mean of its group, divided by the group's std: the advantages of GRPO. */
const normalized = (batch, values) =>
  inGroups(batch, values, (group) => {
    if (allEqual(group)) return group.map(() => 0);
    const average = mean(group);
    const std = Math.sqrt(sum(group.map((x) => (x - average) ** 2)) / (group.length - 1));
    return group.map((x) => (x - average) / (std + 1e-4));
  });

/** Mean 0 and std 1 over all tokens of the batch. */
function whitened(lists) {
  const average = mean(lists.flat());
  const variance = mean(lists.flat().map((x) => (x - average) ** 2));
  return lists.map((list) => list.map((x) => (x - average) / Math.sqrt(Math.max(variance, 1e-8))));
}

// --- losses ------------------------------------------------------------------------------------------------

// How much one token counts in the loss.
const meanOverTokens = (batch) => 1 / sum(batch.responses.map((response) => response.logRatios.length));
const meanOverResponses = (batch) => 1 / batch.responses.length;
const overLength = (batch, response) => 1 / (batch.responses.length * response.logRatios.length);
const overMaxLength = (batch) => 1 / (batch.responses.length * batch.maxLength);

/** REINFORCE: the weight of a token is its advantage. */
const reinforceLoss = (batch, advantages, share) => ({
  advantages,
  weights: eachToken(batch, (response, t, i) => share(batch, response) * advantages[i][t]),
  clipped: eachToken(batch, () => false),
});

/** PPO's loss: no gradient where the ratio has moved past the clip in the direction of the advantage. */
function clippedLoss(batch, advantages, share, low = 0.2, high = 0.2, klPull = () => 0) {
  const clipped = eachToken(batch, ({ logRatios }, t, i) => {
    const ratio = Math.exp(logRatios[t]);
    return clamp(ratio, 1 - low, 1 + high) * advantages[i][t] < ratio * advantages[i][t];
  });
  const weights = eachToken(batch, (response, t, i) => {
    const push = clipped[i][t] ? 0 : Math.exp(response.logRatios[t]) * advantages[i][t];
    return share(batch, response) * (push + klPull(response, t));
  });
  return { advantages, weights, clipped, stops: "token" };
}

// Two KL terms of a loss: minus beta times their derivative, with d = log(pi_theta / pi_ref).
const logRefRatio = ({ old, logRatios, ref }, t) => old[t] + logRatios[t] - ref[t];
const k2Pull = (response, t) => -0.01 * logRefRatio(response, t);
const k3Pull = (response, t) => -0.01 * (1 - Math.exp(-logRefRatio(response, t)));

// --- scripts -----------------------------------------------------------------------------------------------

function reinforce(batch) {
  const values = penalizedRewards(batch);
  const average = mean(values);
  const advantages = values.map((x) => x - average);
  return reinforceLoss(batch, onTokens(batch, advantages), meanOverResponses);
}

function rloo(batch) {
  const advantages = inGroups(batch, penalizedRewards(batch), (group) =>
    group.map((x) => x - (sum(group) - x) / (group.length - 1)),
  );
  return reinforceLoss(batch, onTokens(batch, advantages), meanOverResponses);
}

/** OPO's baseline is the mean of the group, where a response counts in proportion to its length. */
function opo(batch) {
  const length = (response) => response.logRatios.length;
  const advantages = inGroups(batch, batch.responses, (group) => {
    const baseline = sum(group.map((x) => length(x) * x.reward)) / sum(group.map(length));
    return group.map((x) => x.reward - baseline);
  });
  return reinforceLoss(batch, onTokens(batch, advantages), meanOverResponses);
}

function raft(batch) {
  const advantages = inGroups(batch, penalizedRewards(batch), (group) => {
    const best = group.indexOf(Math.max(...group)); // the first of equals
    return group.map((_, i) => (i == best ? group.length : 0));
  });
  return reinforceLoss(batch, onTokens(batch, advantages), meanOverResponses);
}

function remax(batch) {
  const klPenalty = (response, t) => 0.01 * klToGo(response, t);
  const advantages = eachToken(batch, (response, t) => response.reward - response.greedy - klPenalty(response, t));
  return reinforceLoss(batch, advantages, meanOverTokens);
}

function reinforce_pp(batch) {
  const returns = eachToken(batch, (response, t) => response.reward - 0.01 * klToGo(response, t));
  return clippedLoss(batch, whitened(returns), meanOverTokens);
}

function reinforce_pp_baseline(batch) {
  const differences = inGroups(batch, rewards(batch), (group) =>
    group.map((x) => (allEqual(group) ? 0 : x - mean(group))),
  );
  const variance = mean(differences.map((x) => x ** 2));
  const advantages = differences.map((x) => x / Math.sqrt(Math.max(variance, 1e-8)));
  return clippedLoss(batch, onTokens(batch, advantages), meanOverTokens, 0.2, 0.2, k2Pull);
}

function ppo(batch) {
  const lambda = 0.95;
  const advantages = batch.responses.map(({ reward, old, ref, values }) => {
    const result = [];
    for (let t = values.length - 1; t >= 0; t--) {
      const isLast = t == values.length - 1;
      const tokenReward = -0.01 * (old[t] - ref[t]) + (isLast ? reward : 0);
      const delta = tokenReward + (isLast ? 0 : values[t + 1]) - values[t];
      result[t] = delta + (isLast ? 0 : lambda * result[t + 1]);
    }
    return result;
  });
  return clippedLoss(batch, whitened(advantages), meanOverTokens);
}

function grpo(batch) {
  const advantages = onTokens(batch, normalized(batch, rewards(batch)));
  return clippedLoss(batch, advantages, overLength, 0.2, 0.2, k3Pull);
}

function dr_grpo(batch) {
  const advantages = onTokens(batch, centered(batch, rewards(batch)));
  return clippedLoss(batch, advantages, overMaxLength);
}

function dapo(batch) {
  const buffer = 8; // the score falls by up to 1 over the last so many tokens
  const scores = batch.responses.map(({ reward, logRatios }) => {
    const excess = logRatios.length - batch.maxLength + buffer;
    return reward - Math.max(excess, 0) / buffer;
  });
  return clippedLoss(batch, onTokens(batch, normalized(batch, scores)), meanOverTokens, 0.2, 0.28);
}

/** GSPO clips the ratio of a whole response. It is the clipped loss where each token has the mean log-ratio. */
function gspo(batch) {
  const advantages = onTokens(batch, normalized(batch, rewards(batch)));
  const responses = batch.responses.map((response) => {
    const average = mean(response.logRatios);
    return { ...response, logRatios: response.logRatios.map(() => average) };
  });
  return { ...clippedLoss({ ...batch, responses }, advantages, overLength, 3e-4, 4e-4), stops: "response" };
}

function cispo(batch) {
  const advantages = onTokens(batch, normalized(batch, rewards(batch)));
  const weighted = eachToken(batch, ({ logRatios }, t, i) => Math.min(Math.exp(logRatios[t]), 1.28) * advantages[i][t]);
  return { ...reinforceLoss(batch, weighted, meanOverTokens), advantages };
}

function maxrl(batch) {
  const advantages = inGroups(batch, rewards(batch), (group) =>
    group.map((x) => (mean(group) == 0 ? 0 : (x - mean(group)) / mean(group))),
  );
  return reinforceLoss(batch, onTokens(batch, advantages), meanOverResponses);
}

/** SAPO's gate is sigmoid(tau (ratio - 1)) 4 / tau. Its derivative closes slowly where PPO's clip cuts. */
function sapo(batch) {
  const advantages = onTokens(batch, normalized(batch, rewards(batch)));
  const weighted = eachToken(batch, ({ logRatios }, t, i) => {
    const ratio = Math.exp(logRatios[t]);
    const tau = advantages[i][t] > 0 ? 1.0 : 1.05;
    const gate = 1 / (1 + Math.exp(-tau * (ratio - 1)));
    return 4 * gate * (1 - gate) * ratio * advantages[i][t];
  });
  return { ...reinforceLoss(batch, weighted, overLength), advantages };
}

/** DPPO stops a token whose probability has moved by more than delta in the direction of the advantage. */
function dppo(batch) {
  const [delta, maxRatio] = [0.15, 20];
  const advantages = onTokens(batch, normalized(batch, rewards(batch)));
  const clipped = eachToken(batch, ({ old, logRatios }, t, i) => {
    const change = Math.exp(old[t] + logRatios[t]) - Math.exp(old[t]);
    return advantages[i][t] > 0 ? change > delta : change < -delta;
  });
  const weighted = eachToken(batch, ({ logRatios }, t, i) =>
    clipped[i][t] ? 0 : Math.min(Math.exp(logRatios[t]), maxRatio) * advantages[i][t],
  );
  return { ...reinforceLoss(batch, weighted, meanOverTokens), advantages, clipped, stops: "token" };
}

/** FlashREINFORCE leaves out a response whose mean KL over two outcomes, this token or any other, is above delta. */
function flash_reinforce(batch) {
  const delta = 0.003;
  const average = mean(rewards(batch));
  const advantages = eachToken(batch, ({ reward }) => reward - average);
  const divergence = eachToken(batch, ({ old, logRatios }, t) => {
    const [p, q] = [old[t], old[t] + logRatios[t]].map((x) => clamp(Math.exp(x), 1e-6, 1 - 1e-6));
    return p * Math.log(p / q) + (1 - p) * Math.log((1 - p) / (1 - q));
  });
  const clipped = eachToken(batch, (_, t, i) => mean(divergence[i]) > delta);
  const weighted = eachToken(batch, ({ logRatios }, t, i) =>
    clipped[i][t] ? 0 : Math.exp(logRatios[t]) * advantages[i][t],
  );
  return { ...reinforceLoss(batch, weighted, overLength), advantages, clipped, stops: "response" };
}

function distill(batch) {
  const advantages = eachToken(batch, ({ old, teacher }, t) => teacher[t] - old[t]);
  return reinforceLoss(batch, advantages, meanOverTokens);
}

const ESTIMATORS = {
  ...{ reinforce, rloo, opo, raft, remax, reinforce_pp, reinforce_pp_baseline, ppo, grpo, dr_grpo, dapo, gspo, cispo },
  ...{ maxrl, sapo, dppo, flash_reinforce, distill },
};

// --- what the page starts from -----------------------------------------------------------------------------

const MAX_LENGTH = 40; // max_response_length of the scripts
const PROBABILITY = 0.5; // pi_old of each token

/** The batch of {prompts: [{greedy, responses: [{reward, logRatios}]}], teacher}, where teacher is a probability. */
function batchOf({ prompts, teacher }) {
  const responses = prompts.flatMap(({ greedy, responses }) =>
    responses.map(({ reward, logRatios }) => {
      const fill = (x) => logRatios.map(() => x);
      const old = fill(Math.log(PROBABILITY));
      return { reward, greedy, logRatios, old, ref: old, teacher: fill(Math.log(teacher)), values: fill(0) };
    }),
  );
  return { k: prompts[0].responses.length, maxLength: MAX_LENGTH, responses };
}

/** "4x1_8,0_24_3*0.2": four responses with reward 1 and 8 tokens; one with reward 0, 24 tokens, and 3 more tokens that
 * have the log-ratio 0.2. Never more than 9 responses, nor 41 tokens each, whatever the text says. */
const parseResponses = (text) =>
  text
    .split(",")
    .flatMap((part) => {
      const copies = part.match(/^(\d+)x/)?.[1] ?? "1";
      const [reward, ...runs] = part.replace(/^\d+x/, "").split("_");
      const logRatios = runs.flatMap((run) => {
        const [count, logRatio = "0"] = run.split("*");
        const tokens = clamp(Math.trunc(Number(count)) || 0, 0, MAX_LENGTH + 1);
        return Array(tokens).fill(Number(logRatio));
      });
      const response = () => ({ reward: reward ? Number(reward) : NaN, logRatios: [...logRatios] });
      return Array.from({ length: Math.min(Number(copies), 9) }, response);
    })
    .slice(0, 9);

const prompt = (responses, greedy) => ({ greedy, responses: parseResponses(responses) });
const preset = (title, says, ...prompts) => ({ title, says, group: { prompts, teacher: 0.8 } });

// Each says what to look at.
const PRESETS = {
  length: preset(
    "A long wrong answer, a long right one",
    "A8 and B1 are long. In grpo.py, gspo.py, sapo.py and flash_reinforce.py, a token of theirs gets 1/3 of the push " +
      "of a token of a short answer: a short right answer gains most per token, a long wrong one loses least. In " +
      "dr_grpo.py and most others, the push of a token does not depend on the length.",
    prompt("4x1_8,3x0_8,0_24", 1),
    prompt("1_24,3x1_8,4x0_8", 0),
  ),
  success: preset(
    "One success in eight",
    "Only A1 is right. grpo.py and most others push it up 7 times as hard as they push each of A2 to A8 down, and " +
      "give prompt B no push. remax.py pushes A1 alone: the others have the reward of the greedy answer.",
    prompt("1_8,7x0_8", 0),
    prompt("8x0_8", 0),
  ),
  equal: preset(
    "All rewards equal",
    "Where all answers to a prompt have the same reward, most scripts give no push. reinforce.py, reinforce_pp.py " +
      "and ppo.py compare the two prompts, and push A up and B down. raft.py imitates A1 and B1.",
    prompt("8x1_8", 1),
    prompt("8x0_8", 0),
  ),
  outlier: preset(
    "An outlier reward",
    "The reward 10 of A1 raises the mean, so that grpo.py, rloo.py and most others push the right answers A2, A3 and " +
      "A4 down. remax.py pushes them up: its baseline is the reward of the greedy answer.",
    prompt("10_8,3x1_8,4x0_8", 0),
    prompt("4x1_8,4x0_8", 0),
  ),
  signs: preset(
    "Rewards −1 and 1",
    "With rewards 0 and 1, grpo.py and reinforce_pp.py would push the same: they divide by a standard deviation. " +
      "rloo.py and dr_grpo.py would push half as hard. maxrl.py divides by the mean reward, which is negative for " +
      "prompt B, and so pushes the right answers B1, B2 and B3 down.",
    prompt("5x1_8,3x-1_8", 1),
    prompt("3x1_8,5x-1_8", -1),
  ),
  prompts: preset(
    "An easy and a hard prompt",
    "Six answers to prompt A are right, and one to prompt B. maxrl.py pushes B 3.5 times as hard as A, all answers " +
      "together. grpo.py pushes B less hard than A, and rloo.py and reinforce_pp_baseline.py even less.",
    prompt("6x1_8,2x0_8", 1),
    prompt("1_8,7x0_8", 0),
  ),
  moved: preset(
    "The policy has moved",
    "The clip of grpo.py stops tokens that have already moved far in the wanted direction. dppo.py stops fewer, and " +
      "gspo.py and flash_reinforce.py whole responses. cispo.py and sapo.py stop none. In rloo.py, the log-ratios " +
      "change nothing.",
    prompt("1_4*0.1_4,1_8*0.15,1_2*0.3_6,1_8*-0.1,2x0_8*-0.1,0_3*-0.4_5,0_8*0.2", 1),
    prompt("1_2*0.5_6*0.1,1_8,2x0_8*-0.15,0_2*0.4_6,0_4*-0.3_4,2x0_8", 0),
  ),
};
