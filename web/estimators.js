// Estimators of policy scripts in JavaScript, for the page Train it. One function per script, with the script's default
// flags but for beta; a script without one is not on that page. tests/web/test_site.py compares them with the scripts.
//
// A batch is {k, beta, maxLength, responses}: k responses to each prompt, those of the first prompt first, and one
// optimizer step for all of them. A response is {reward, greedy, logRatios, old, ref, values}:
//   reward      its score                             greedy   the score of the greedy response to its prompt
//   logRatios   log(pi_theta / pi_old) of each token  old      log pi_old of each token
//   ref         log pi_ref of each token              values   the critic's value before each token
//
// Each function returns {advantages, weights, clipped}: a list per response, with an entry per token. The weight of a
// token is -d loss / d logprob. clipped is true where the clip stops the gradient of the policy loss. And share, a
// function: how much one token counts in the loss.

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
const penalizedRewards = (batch) => batch.responses.map((response) => response.reward - batch.beta * klToGo(response, 0));

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

const meanOverTokens = (batch) => 1 / sum(batch.responses.map((response) => response.logRatios.length));
const meanOverResponses = (batch) => 1 / batch.responses.length;
const overLength = (batch, response) => 1 / (batch.responses.length * response.logRatios.length);
const overMaxLength = (batch) => 1 / (batch.responses.length * batch.maxLength);

/** REINFORCE: the weight of a token is its advantage. */
const reinforceLoss = (batch, advantages, share) => ({
  share,
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
    return share(batch, response) * (push + batch.beta * klPull(response, t));
  });
  return { share, advantages, weights, clipped };
}

// Two KL terms of a loss: minus their derivative, with d = log(pi_theta / pi_ref).
const logRefRatio = ({ old, logRatios, ref }, t) => old[t] + logRatios[t] - ref[t];
const k2Pull = (response, t) => -logRefRatio(response, t);
const k3Pull = (response, t) => Math.exp(-logRefRatio(response, t)) - 1;

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
  const klPenalty = (response, t) => batch.beta * klToGo(response, t);
  const advantages = eachToken(batch, (response, t) => response.reward - response.greedy - klPenalty(response, t));
  return reinforceLoss(batch, advantages, meanOverTokens);
}

function reinforce_pp(batch) {
  const returns = eachToken(batch, (response, t) => response.reward - batch.beta * klToGo(response, t));
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
      const tokenReward = -batch.beta * (old[t] - ref[t]) + (isLast ? reward : 0);
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
  return clippedLoss({ ...batch, responses }, advantages, overLength, 3e-4, 4e-4);
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
  return { ...reinforceLoss(batch, weighted, meanOverTokens), advantages, clipped };
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
  return { ...reinforceLoss(batch, weighted, overLength), advantages, clipped };
}

const ESTIMATORS = {
  ...{ reinforce, rloo, opo, raft, remax, reinforce_pp, reinforce_pp_baseline, ppo, grpo, dr_grpo, dapo, gspo, cispo },
  ...{ maxrl, sapo, dppo, flash_reinforce },
};
