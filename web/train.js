// The page Train it: a policy that is a tree of choices, those of tree.js, trained in the browser.
//
// The address contains what differs from the page's defaults, train.html#method=grpo&k=4&rate=3, in the order of the
// controls in train.html. run=30 trains 30 rollouts at once. Lessons are such addresses, and docs/learn.md links them.
// A script without an estimator is not on this page. tests/web/test_site.py compares the estimators with the scripts.

// --- estimators: a function for each script, with its default flags but for beta ------------------------------

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
const ratio = ({ logRatios }, t) => Math.exp(logRatios[t]);
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

/** The reward minus the KL penalty from token t on. */
const returnAt = (batch, response, t) => response.reward - batch.beta * klToGo(response, t);
const penalizedRewards = (batch) => batch.responses.map((response) => returnAt(batch, response, 0));

/** f(values of the group) for each group of k values, which returns k values. */
function inGroups(batch, values, f) {
  const groups = [];
  for (let first = 0; first < values.length; first += batch.k) groups.push(values.slice(first, first + batch.k));
  return groups.flatMap(f);
}

/** Each value minus the mean of its group, and 0 if all are equal. */
const centered = (batch, values) =>
  inGroups(batch, values, (group) => group.map((x) => (group.every((y) => y == x) ? 0 : x - mean(group))));

/** The same, divided by the group's std: the advantages of GRPO. */
const normalized = (batch) =>
  inGroups(batch, centered(batch, rewards(batch)), (group) => {
    const std = Math.sqrt(sum(group.map((x) => x ** 2)) / (group.length - 1));
    return group.map((x) => x / (std + 1e-4));
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

/** REINFORCE: the weight of a token is its advantage, times a factor of the method, or 0 where it is clipped. */
function reinforceLoss(batch, advantages, share, factor = () => 1, clipped = eachToken(batch, () => false)) {
  const weights = eachToken(batch, (response, t, i) =>
    clipped[i][t] ? 0 : share(batch, response) * factor(response, t, i) * advantages[i][t],
  );
  return { share, advantages, weights, clipped };
}

/** PPO's loss: no gradient where the ratio has moved past the clip in the direction of the advantage. */
function clippedLoss(batch, advantages, share, low = 0.2, high = 0.2, klPull = () => 0) {
  const clipped = eachToken(batch, (response, t, i) => {
    const [A, r] = [advantages[i][t], ratio(response, t)];
    return clamp(r, 1 - low, 1 + high) * A < r * A;
  });
  const weights = eachToken(batch, (response, t, i) => {
    const push = clipped[i][t] ? 0 : ratio(response, t) * advantages[i][t];
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
  return reinforceLoss(batch, onTokens(batch, values.map((x) => x - mean(values))), meanOverResponses);
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
  const advantages = eachToken(batch, (response, t) => returnAt(batch, response, t) - response.greedy);
  return reinforceLoss(batch, advantages, meanOverTokens);
}

function reinforce_pp(batch) {
  const returns = eachToken(batch, (response, t) => returnAt(batch, response, t));
  return clippedLoss(batch, whitened(returns), meanOverTokens);
}

function reinforce_pp_baseline(batch) {
  const differences = centered(batch, rewards(batch));
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
  return clippedLoss(batch, onTokens(batch, normalized(batch)), overLength, 0.2, 0.2, k3Pull);
}

function dr_grpo(batch) {
  return clippedLoss(batch, onTokens(batch, centered(batch, rewards(batch))), overMaxLength);
}

function dapo(batch) {
  const buffer = 8; // the score falls by up to 1 over the last so many tokens
  const responses = batch.responses.map((response) => {
    const excess = response.logRatios.length - batch.maxLength + buffer;
    return { ...response, reward: response.reward - Math.max(excess, 0) / buffer };
  });
  const advantages = onTokens(batch, normalized({ ...batch, responses }));
  return clippedLoss(batch, advantages, meanOverTokens, 0.2, 0.28);
}

/** GSPO clips the ratio of a whole response. It is the clipped loss where each token has the mean log-ratio. */
function gspo(batch) {
  const responses = batch.responses.map((response) => {
    const average = mean(response.logRatios);
    return { ...response, logRatios: response.logRatios.map(() => average) };
  });
  return clippedLoss({ ...batch, responses }, onTokens(batch, normalized(batch)), overLength, 3e-4, 4e-4);
}

function cispo(batch) {
  const weight = (response, t) => Math.min(ratio(response, t), 1.28);
  return reinforceLoss(batch, onTokens(batch, normalized(batch)), meanOverTokens, weight);
}

function maxrl(batch) {
  const advantages = inGroups(batch, rewards(batch), (group) =>
    group.map((x) => (mean(group) == 0 ? 0 : (x - mean(group)) / mean(group))),
  );
  return reinforceLoss(batch, onTokens(batch, advantages), meanOverResponses);
}

/** SAPO's gate is sigmoid(tau (ratio - 1)) 4 / tau. Its derivative closes slowly where PPO's clip cuts. */
function sapo(batch) {
  const advantages = onTokens(batch, normalized(batch));
  const weight = (response, t, i) => {
    const tau = advantages[i][t] > 0 ? 1.0 : 1.05;
    const gate = 1 / (1 + Math.exp(-tau * (ratio(response, t) - 1)));
    return 4 * gate * (1 - gate) * ratio(response, t);
  };
  return reinforceLoss(batch, advantages, overLength, weight);
}

/** DPPO stops a token whose probability has moved by more than delta in the direction of the advantage. */
function dppo(batch) {
  const advantages = onTokens(batch, normalized(batch));
  const clipped = eachToken(batch, ({ old, logRatios }, t, i) => {
    const change = Math.exp(old[t] + logRatios[t]) - Math.exp(old[t]);
    return advantages[i][t] > 0 ? change > 0.15 : change < -0.15;
  });
  return reinforceLoss(batch, advantages, meanOverTokens, (response, t) => Math.min(ratio(response, t), 20), clipped);
}

/** FlashREINFORCE leaves out a response whose mean KL over two outcomes, this token or any other, is above delta. */
function flash_reinforce(batch) {
  const average = mean(rewards(batch));
  const advantages = eachToken(batch, ({ reward }) => reward - average);
  const divergence = eachToken(batch, ({ old, logRatios }, t) => {
    const [p, q] = [old[t], old[t] + logRatios[t]].map((x) => clamp(Math.exp(x), 1e-6, 1 - 1e-6));
    return p * Math.log(p / q) + (1 - p) * Math.log((1 - p) / (1 - q));
  });
  const clipped = eachToken(batch, (_, t, i) => mean(divergence[i]) > 0.003);
  return reinforceLoss(batch, advantages, overLength, ratio, clipped);
}

const ESTIMATORS = {
  ...{ reinforce, rloo, opo, raft, remax, reinforce_pp, reinforce_pp_baseline, ppo, grpo, dr_grpo, dapo, gspo, cispo },
  ...{ maxrl, sapo, dppo, flash_reinforce },
};

// --- the policy: a list of the logits of all choices ----------------------------------------------------------

const START = []; // before training: the reference

const choiceOf = (probabilities) => {
  const at = START.length;
  return { at, end: START.push(...probabilities.map((p) => Math.log(p))) };
};

const THINK = choiceOf(TREES[0].first); // or answer; all prompts share this choice

/** All responses to a prompt: the right one, its slips, ten guesses. A token without a choice has probability 1. */
function promptOf({ prompt, answer, digits, steps }) {
  const token = (text, choice, option) => ({ text: text.replace(/[<>]/g, ""), choice, option });
  const path = [token("think", THINK, 0)];
  const slips = steps.map(([text, p, slip, score]) => {
    const choice = choiceOf([p, 1 - p]);
    const [other, ...rest] = slip.split(" ");
    const tokens = [...path, token(other, choice, 1), ...rest.map((word) => token(word))];
    path.push(token(text, choice, 0));
    return { score, tokens };
  });
  const digit = choiceOf(digits);
  const guesses = digits.map((_, d) => {
    const tokens = [token("answer", THINK, 1), token(`${d}`, digit, d), token("eos")];
    return { isGuess: true, score: Number(d == answer), tokens };
  });
  return { prompt, responses: [{ score: 1, tokens: path }, ...slips, ...guesses] };
}

const PROMPTS = TREES.map(promptOf);

/** Log-probs of the options of a choice. */
function logProbs({ at, end }, policy) {
  const logits = policy.slice(at, end);
  const largest = Math.max(...logits);
  const norm = largest + Math.log(sum(logits.map((x) => Math.exp(x - largest))));
  return logits.map((x) => x - norm);
}

const logProb = ({ choice, option }, policy) => (choice ? logProbs(choice, policy)[option] : 0);
const logProbOf = (tokens, policy) => sum(tokens.map((token) => logProb(token, policy)));

/** The score of the response that takes the likeliest option each time. */
function greedyScore({ responses }, policy) {
  const isBest = (x) => !x.choice || logProb(x, policy) == Math.max(...logProbs(x.choice, policy));
  return responses.find(({ tokens }) => tokens.every(isBest)).score;
}

/** What the policy is: sums over all responses times their probability, and the mean over the prompts. */
function exact(prompts, policy) {
  const over = (f) => {
    const term = (x) => Math.exp(logProbOf(x.tokens, policy)) * f(x);
    return mean(prompts.map(({ responses }) => sum(responses.map(term))));
  };
  return {
    think: over(({ isGuess }) => (isGuess ? 0 : 1)),
    lucky: over(({ isGuess, score }) => (isGuess ? score : 0)),
    wrong: over(({ isGuess, score }) => (isGuess ? 1 - score : 0)),
    accuracy: over(({ score }) => score),
    greedy: mean(prompts.map((prompt) => greedyScore(prompt, policy))),
    distance: over(({ tokens }) => logProbOf(tokens, policy) - logProbOf(tokens, START)), // KL
    length: over(({ tokens }) => tokens.length),
  };
}

// --- training ------------------------------------------------------------------------------------------------

const LENGTH = exact(PROMPTS.slice(0, 1), START).length; // 6.6, the mean length before training
const MAX_LENGTH = 40; // of a response, in the scripts

function newRun(settings) {
  let x = (settings.seed * 123456789) % 2147483647 || 1;
  const random = () => (x = (x * 16807) % 2147483647) / 2147483647; // between 0 and 1, by Lehmer's method
  const prompts = PROMPTS.slice(0, settings.prompts);
  return sample({ settings, prompts, random, policy: START, values: new Map(), log: [] });
}

/** A rollout: k responses to each prompt. */
function sample(run) {
  const { settings, prompts, policy } = run;
  run.old = settings.bug == "temperature" ? policy.map((x) => x / 0.7) : policy; // what is sampled from
  run.ref = settings.bug == "reference" ? policy : START;
  run.rollout = prompts.flatMap((prompt) => {
    const chances = prompt.responses.map(({ tokens }) => Math.exp(logProbOf(tokens, run.old)));
    return Array.from({ length: settings.k }, () => {
      let rest = run.random() * sum(chances);
      const n = chances.findIndex((p) => (rest -= p) < 0);
      return { prompt, greedy: greedyScore(prompt, policy), ...prompt.responses.at(n) };
    });
  });
  const tokens = run.rollout.flatMap((response) => response.tokens);
  const kl = (logProbOf(tokens, run.old) - logProbOf(tokens, run.ref)) / run.rollout.length;
  const logprob_difference = mean(tokens.map((x) => Math.abs(logProb(x, run.old) - logProb(x, policy))));
  run.log.push({ ...exact(prompts, policy), kl, logprob_difference });
  return run;
}

/** What the estimators take. */
function batchOf({ settings: { method, k, bug, beta, right }, prompts, old, ref, rollout, policy, values }) {
  const other = (i) => (bug == "axis" ? (i % k) * prompts.length + Math.floor(i / k) : i);
  const responses = rollout.map(({ prompt, greedy, tokens }, i) => {
    const [now, sampled, start] = [policy, old, ref].map((from) => tokens.map((token) => logProb(token, from)));
    const below = { ratio_one: now, ratio_reference: start }[bug] ?? sampled; // the line of the ratio
    return {
      reward: right * rollout[other(i)].score,
      greedy: right * greedy,
      logRatios: now.map((x, t) => x - below[t]),
      old: method == "grpo" || method == "reinforce_pp_baseline" ? below : sampled, // their KL takes old + logRatios
      ref: start,
      values: tokens.map((_, t) => values.get(tokens[t - 1] ?? prompt) ?? 0),
    };
  });
  return { k, beta: { kl_sign: -beta, kl_loss: 0 }[bug] ?? beta, maxLength: MAX_LENGTH, responses };
}

/** What the estimator of the run returns for its rollout. The weight of a token is its push. */
function pushes(run) {
  const { method, beta, bug } = run.settings;
  const batch = batchOf(run);
  let result = ESTIMATORS[method](batch);
  const baseline = { baseline: 0, low_baseline: -10 }[bug];
  if (baseline != null && method == "reinforce") {
    const advantages = penalizedRewards(batch).map((x) => x - baseline);
    result = reinforceLoss(batch, onTokens(batch, advantages), meanOverResponses);
  }
  const weights = eachToken(batch, (response, t, i) => {
    const [push, T] = [result.weights[i][t], response.logRatios.length];
    if (bug == "kl_loss") return push - beta * result.share(batch, response); // k1 pushes all tokens alike
    if (bug == "length") return push * (result.share == overLength ? T / LENGTH : LENGTH / T);
    return push;
  });
  return { ...result, weights };
}

/** Minus the gradient of the loss: a token pushes its own logit by (1 - p), and the others of its choice by -p. */
function gradient(rollout, weights, policy) {
  const result = START.map(() => 0);
  const add = ({ choice, option }, weight) =>
    logProbs(choice, policy).forEach((x, n) => (result[choice.at + n] += weight * ((n == option) - Math.exp(x))));
  rollout.forEach(({ tokens }, i) => tokens.forEach((token, t) => token.choice && add(token, weights[i][t])));
  return result;
}

/** A step of SGD on the rollout. As in the scripts, a gradient longer than 1 is cut to 1. */
function step(run) {
  const { weights, clipped, share } = pushes(run);
  // A loss that is divided by a number of tokens is smaller. That is made up for: all methods start at a like speed.
  const factor = share == meanOverResponses ? 1 : share == overMaxLength ? MAX_LENGTH : LENGTH;
  const g = gradient(run.rollout, weights, run.policy).map((x) => factor * x);
  const grad_norm = Math.hypot(...g);
  run.policy = run.policy.map((x, n) => x + (run.settings.rate * g[n]) / Math.max(grad_norm, 1));
  Object.assign(run.log.at(-1), { grad_norm, clip_fraction: mean(clipped.flat().map(Number)) });
}

/** The critic of ppo is a table: a tenth of the way from the value before each token to the return after it. */
function teachCritic({ rollout, values }, { beta, responses }) {
  responses.forEach((response, i) =>
    response.old.forEach((_, t) => {
      const before = rollout[i].tokens[t - 1] ?? rollout[i].prompt;
      const value = values.get(before) ?? 0;
      values.set(before, value + 0.1 * (response.reward - beta * klToGo(response, t) - value));
    }),
  );
}

function iterate(run) {
  for (let n = 0; n < run.settings.steps; n++) step(run);
  if (run.settings.method == "ppo") teachCritic(run, batchOf(run));
  sample(run);
}

// --- the page ------------------------------------------------------------------------------------------------

const WIDE = 32; // a band of probability 1
const $ = (id) => document.getElementById(id);
const controls = [...$("train").querySelectorAll("select, input")];
const control = (name) => controls.find((x) => x.name == name);
let run; // in progress
let twin; // the same without the bug, if there is one
let before; // the run before
let waiting; // rollouts that are still to come
let summary; // the text beside the buttons

const say = (text) => ($("said").textContent = text);
const both = (act) => [run, twin].forEach((x) => x && act(x));
const digits = (x) => (Math.abs(x) < 1e-4 ? "0" : Math.abs(x) < 0.1 ? x.toPrecision(2) : x.toFixed(2));
const shown = (x = 0) => digits(x).replace("-", "−");

/** A new run with the settings of the page. The one before it stays in grey. */
function begin() {
  if (run?.log.length > 5) before = run;
  // Not one of its options, or not one of its numbers
  for (const x of controls) if (!x.value || !x.checkValidity()) x.value = x.dataset.start;
  const settings = Object.fromEntries(controls.map(({ name, value }) => [name, isNaN(value) ? value : Number(value)]));
  const bug = control("bug").selectedOptions[0].dataset.is ?? settings.bug; // of a mystery
  run = newRun({ ...settings, bug });
  twin = settings.bug == "none" ? null : newRun({ ...settings, bug: "none" });
  waiting = 0;
  for (const name of ["method", "bug"]) $(`${name}-says`).textContent = control(name).selectedOptions[0].title;
  Object.assign($("answer"), { hidden: !twin, open: false });
  draw();
}

/** The settings of the address, the page's own where it has none, and the lesson that has this address. */
function load() {
  const plain = ({ hash }) => hash.replace(/&?run=\d+$/, "") || "#"; // training does not leave the lesson
  const link = [...$("lessons").querySelectorAll("a")].find((x) => plain(x) == plain(location));
  $("lesson").innerHTML = link?.closest("#lessons > li").innerHTML ?? "";
  const wanted = new URLSearchParams(location.hash.slice(1));
  for (const element of controls) element.value = wanted.get(element.name) ?? element.dataset.start;
  begin();
  for (let n = Math.min(wanted.get("run") ?? 0, 500); n > 0; n--) both(iterate);
  draw();
}

/** A policy as bands in SVG, each as wide as the probability p of its tokens; a ghost has neither words nor numbers. */
function bandsOf({ prompt, responses }, policy, isGhost) {
  const write = (x, y, text, kind = "") => `<text x="${x}" y="${y}" class="${kind}">${text}</text>`;
  let html = isGhost ? "" : write(56, 120, prompt);
  /** From the upper edge at fromY to the upper edge at toY. Returns the width. */
  function band(kind, tokens, fromX, fromY, x, toY, label) {
    const [p, start] = [policy, START].map((from) => Math.exp(logProbOf(tokens, from)));
    const [from, y, bend] = [fromY + (WIDE * p) / 2, toY + (WIDE * p) / 2, (fromX + x) / 2];
    const d = `d="M${fromX},${from}C${bend},${from} ${bend},${y} ${x},${y}"`;
    html += `<path class="${isGhost ? "ghost" : kind}" ${d} stroke-width="${Math.max(WIDE * p, 0.4)}"/>`;
    const says = `${tokens.map(({ text }) => text).join(" ")}: probability ${shown(p)}, at the start ${shown(start)}`;
    if (!isGhost) html += `${label(shown(p), y)}<path class="hit" ${d} tabindex="-1" data-says="${says}"/>`;
    return WIDE * p;
  }
  const path = responses[0].tokens;
  const widths = path.map(({ text }, t) => t && 8 + 6.6 * text.length);
  let x = 76;
  const think = band("think", path.slice(0, 1), 0, 102, x, 26, (p) => write(70, 17, `think ${p}`, "last"));
  for (let t = 1; t < path.length; t++) {
    const [text, toX] = [path[t].text, x + (262 * widths[t]) / sum(widths)];
    const word = write((x + toX) / 2, 17, text, "middle");
    const end = (p, y) => (text == "eos" ? write(toX + 4, y + 4, `✓ ${p}`, "good") : "");
    const often = (p, y) => (p > 0.013 ? write(toX, y + 12, p, "middle light") : "");
    const width = band("right", path.slice(0, t + 1), x, 26, toX, 26, (p, y) => word + end(p, y));
    band("slip", responses[t].tokens.slice(0, t + 1), x, 26 + width, x + 14, 76, often);
    x = toX;
  }
  let from = 164;
  responses.slice(path.length).forEach(({ tokens, score }, digit) => {
    const [kind, label] = [score ? "good" : "wrong", (p, y) => write(235, y + 4, `${digit} ${p}`, kind)];
    if (!digit) band("guess", tokens.slice(0, 1), 0, 102 + think, 100, from, (p) => write(8, 212, `answer ${p}`));
    from += band(kind, tokens.slice(0, 2), 100, from, 230, 106 + 14 * digit, label);
  });
  return html;
}

function drawRollout() {
  const { advantages, weights, clipped } = pushes(run);
  const chance = (token) => Math.exp(logProb(token, run.policy));
  const gain = (token) => (control("colour").value == "push" ? 1 : 1 - chance(token));
  const sizes = run.rollout.map(({ tokens }, i) => tokens.map((token, t) => weights[i][t] * gain(token)));
  const largest = Math.max(1e-12, ...sizes.flat().map(Math.abs));
  const html = run.rollout.map(({ prompt, score, tokens }, i) => {
    const cells = tokens.map((token, t) => {
      const [size, value] = [sizes[i][t], run.values.get(tokens[t - 1] ?? prompt)];
      const kind = clipped[i][t] ? "cut" : size > 0 ? "up" : "down";
      const critic = value == null ? "" : `, the critic's value before it ${shown(value)}`;
      const says = `${token.text}: probability ${chance(token).toFixed(4)}, color ${shown(size)}${critic}`;
      const part = `--part: ${Math.round((100 * Math.abs(size)) / largest)}%`;
      return `<i class="${kind}" style="${part}" tabindex="-1" data-says="${says}">${token.text}</i>`;
    });
    const head = i % run.settings.k || run.prompts.length == 1 ? "" : `<b>${prompt.prompt}</b>`;
    const mark = score ? `<span class="good">✓ ${run.settings.right}` : "<span>✗ 0";
    const advantage = shown(mean(advantages[i]));
    return `${head}<div>${mark}</span><span>${advantage}</span><span class="tokens">${cells.join("")}</span></div>`;
  });
  $("rows").innerHTML = html.join("");
  $("strongest").textContent = shown(largest);
}

/** Each figure of the page names its numbers. Grey lines come first, so that they lie below. */
function drawCurves() {
  const logs = [(twin ?? before)?.log ?? [], run.log];
  const longest = Math.max(101, ...logs.map((log) => log.length));
  for (const figure of $("train").querySelectorAll("figure")) {
    const { keys, top } = figure.dataset;
    const valuesOf = (log, key) => log.map((entry) => entry[key]).filter((x) => x != null); // none before the step
    const series = logs.map((log) => keys.split(" ").map((key) => valuesOf(log, key)));
    const [low, high] = [Math.min(0, ...series.flat(2)), Math.max(top, ...series.flat(2))];
    const point = (x, n) => `${(100 * n) / (longest - 1)},${48 - (46 * (x - low)) / (high - low)}`;
    const line = (kind) => (xs, n) => `<polyline class="${"abc"[n]} ${kind}" points="${xs.map(point).join(" ")}"/>`;
    figure.querySelector("svg").innerHTML = [...series[0].map(line("grey")), ...series[1].map(line(""))].join("");
    figure.classList.toggle("blank", logs.every((log) => log.length < 2));
    figure.querySelector("figcaption").dataset.high = shown(high);
    figure.querySelectorAll("output").forEach((output, n) => (output.textContent = shown(series[1][n].at(-1))));
  }
}

function draw() {
  $("tree").innerHTML = bandsOf(run.prompts[0], START, true) + bandsOf(run.prompts[0], run.policy);
  drawRollout();
  drawCurves();
  const { think, accuracy } = exact(run.prompts, run.policy);
  $("apart").hidden = true;
  say((summary = `Rollout ${run.log.length - 1}: P(think) ${shown(think)}, accuracy ${shown(accuracy)}`));
  if (twin) {
    const name = control("bug").querySelector(`[value=${run.settings.bug}]`).textContent;
    const ends = `Accuracy ${shown(run.log.at(-1).accuracy)}, without the bug ${shown(twin.log.at(-1).accuracy)}.`;
    const same = run.policy.every((x, n) => x == twin.policy[n]) ? "It has changed nothing so far." : "";
    $("verdict").textContent = `The bug: ${name}. ${ends} ${same}`;
  }
  $("run").textContent = waiting ? "Pause" : "Run";
  if (waiting) return; // browsers limit how often an address may change
  const changed = controls.filter(({ value, dataset }) => value != dataset.start);
  const parts = changed.map(({ name, value }) => `${name}=${value}`);
  $("changed").textContent = parts.join(", ");
  if (run.log.length > 1) parts.push(`run=${run.log.length - 1}`);
  history.replaceState(null, "", `#${parts.join("&")}`);
}

/** Does another seed tell the same story? */
async function trySeeds() {
  const [ends, { settings }] = [[], run];
  for (let seed = 1; seed <= 20; seed++) {
    const other = newRun({ ...settings, seed });
    for (let n = 0; n < 100; n++) iterate(other);
    ends.push(other.log.at(-1));
    say(`Seed ${seed} of 20 …`);
    await new Promise((done) => setTimeout(done));
    if (run.settings != settings) return; // others were chosen
  }
  const range = (xs) => `${mean(xs).toFixed(2)} (${Math.min(...xs).toFixed(2)} to ${Math.max(...xs).toFixed(2)})`;
  const [think, accuracy] = ["think", "accuracy"].map((key) => range(ends.map((end) => end[key])));
  const most = (key) => ends.filter((end) => end[key] == Math.max(end.think, end.lucky, end.wrong)).length;
  const ways = `${most("think")} think, ${most("lucky")} guess right, ${most("wrong")} guess wrong`;
  $("apart").hidden = false;
  say((summary = `P(think) ${think}, accuracy ${accuracy}, ${ways}`));
}

for (const element of controls) element.dataset.start = element.value;
$("settings").onchange = begin;
control("colour").onchange = draw;
$("run").onclick = () => ((waiting = waiting ? 0 : 100), draw());
setInterval(() => waiting && (waiting--, both(iterate), draw()), 40);
$("step").onclick = () => (both(step), draw());
$("sample").onclick = () => (both(sample), draw());
$("again").onclick = begin;
$("seeds").onclick = trySeeds;
const read = ({ target }) => say(target.dataset.says ?? document.activeElement.dataset.says ?? summary);
for (const kind of ["pointerover", "focusin"]) $("train").addEventListener(kind, read);
// In the tree and the rollout, the arrow keys go from number to number.
$("train").onkeydown = (event) => {
  const all = [...(event.target.closest("#tree, #rows")?.querySelectorAll("[data-says]") ?? [])];
  const way = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  if (way && all.length) all[(all.indexOf(event.target) + way + all.length) % all.length].focus();
};
addEventListener("hashchange", load);
load();
