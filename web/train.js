// The page Train it: a policy that is a tree of choices, trained in the browser by the estimators of the scripts.
// estimators.js comes before this file, and tree.js, which has the choices of toy/policy.
//
// The address holds what differs from the page's defaults, as name=value: train.html#method=grpo&k=4&rate=3. Names and
// values are those of the controls in train.html (method, bug, prompts, k, rate, beta, steps, right, seed, colour), and
// run=30 trains 30 rollouts at once. The lessons at the end of train.html are such addresses.

// --- the policy ----------------------------------------------------------------------------------------------

let size = 2; // of theta, which says how far each logit has moved since the start

/** A choice between options with these probabilities at the start. Its logits have the places from `at` in theta. */
function choiceOf(probabilities, at = (size += probabilities.length) - probabilities.length) {
  return { start: probabilities.map((p) => Math.log(p)), at };
}

/** All responses to a prompt: the worked-out one, its slips, ten guesses. A token without a choice has probability 1. */
function promptOf({ prompt, answer, first, digits, steps }) {
  const token = (text, choice, option) => ({ text: text.replace(/[<>]/g, ""), choice, option });
  const [start, digit] = [choiceOf(first, 0), choiceOf(digits)]; // all prompts share the first choice
  const path = [token("think", start, 0)];
  const slips = steps.map(([text, p, slip, score]) => {
    const choice = choiceOf([p, 1 - p]);
    const [other, ...rest] = slip.split(" ");
    const tokens = [...path, token(other, choice, 1), ...rest.map((word) => token(word))];
    path.push(token(text, choice, 0));
    return { score, tokens };
  });
  const guesses = digits.map((_, d) => {
    const tokens = [token("answer", start, 1), token(`${d}`, digit, d), token("eos")];
    return { isGuess: true, score: Number(d == answer), tokens };
  });
  return { prompt, responses: [{ score: 1, tokens: path }, ...slips, ...guesses] };
}

const PROMPTS = TREES.map(promptOf);
const START = new Float64Array(size); // theta before training: the reference

/** Log-probs of the options of a choice. */
function logProbs({ start, at }, theta, temperature = 1) {
  const logits = start.map((x, option) => (x + theta[at + option]) / temperature);
  const largest = Math.max(...logits);
  const norm = largest + Math.log(sum(logits.map((x) => Math.exp(x - largest))));
  return logits.map((x) => x - norm);
}

const logProb = ({ choice, option }, ...policy) => (choice ? logProbs(choice, ...policy)[option] : 0);
const logProbOf = (tokens, ...policy) => sum(tokens.map((token) => logProb(token, ...policy)));

/** The score of the response that takes the likeliest option each time. */
function greedyScore({ responses }, theta) {
  const isBest = (x) => !x.choice || logProb(x, theta) == Math.max(...logProbs(x.choice, theta));
  return responses.find(({ tokens }) => tokens.every(isBest))?.score ?? 0;
}

/** What the policy is: sums over all responses times their probability, and the mean over the prompts. */
function exact(prompts, theta) {
  const all = prompts.map((prompt) => {
    const logs = prompt.responses.map(({ tokens }) => logProbOf(tokens, theta));
    const over = (f) => sum(prompt.responses.map((response, n) => Math.exp(logs[n]) * f(response, logs[n])));
    return {
      think: over(({ isGuess }) => !isGuess),
      lucky: over(({ isGuess, score }) => (isGuess ? score : 0)),
      accuracy: over(({ score }) => score),
      greedy: greedyScore(prompt, theta),
      distance: over(({ tokens }, log) => log - logProbOf(tokens, START)),
      length: over(({ tokens }) => tokens.length),
    };
  });
  return Object.fromEntries(Object.keys(all[0]).map((name) => [name, mean(all.map((x) => x[name]))]));
}

// --- training ------------------------------------------------------------------------------------------------

const SUMS = ["reinforce", "rloo", "opo", "raft", "maxrl"]; // the loss sums over the tokens of a response
const OVER_LENGTH = ["grpo", "gspo", "sapo", "flash_reinforce"]; // it takes their mean
const LENGTH = exact(PROMPTS.slice(0, 1), START).length; // 6.6: the mean length at the start
const MAX_LENGTH = 40; // of a response, in the scripts
// The other losses are smaller: their rate is larger by what they divide by.
const rateFactor = (method) => (SUMS.includes(method) ? 1 : method == "dr_grpo" ? MAX_LENGTH : LENGTH);

/** Random numbers between 0 and 1, the same for the same seed (mulberry32). */
function randomFrom(seed) {
  return () => {
    seed = (seed + 0x6d2b79f5) | 0;
    let t = Math.imul(seed ^ (seed >>> 15), 1 | seed);
    t = (t + Math.imul(t ^ (t >>> 7), 61 | t)) ^ t;
    return ((t ^ (t >>> 14)) >>> 0) / 2 ** 32;
  };
}

function newRun(settings) {
  const run = { settings, prompts: PROMPTS.slice(0, settings.prompts), theta: START, values: new Map(), log: [] };
  sample(run);
  return run;
}

/** A rollout: k responses to each prompt, the same ones for the same seed and policy. */
function sample(run) {
  const { seed, k, bug } = run.settings;
  const random = randomFrom(1_000_000 * seed + run.log.length);
  run.old = [run.theta, bug == "temperature" ? 0.7 : 1]; // what is sampled from, pi_old
  run.ref = [bug == "reference" ? run.theta : START];
  run.rollout = run.prompts.flatMap((prompt) => {
    const chances = prompt.responses.map(({ tokens }) => Math.exp(logProbOf(tokens, ...run.old)));
    return Array.from({ length: k }, () => {
      let rest = random() * sum(chances);
      const n = chances.findIndex((x) => (rest -= x) < 0);
      return { prompt, greedy: greedyScore(prompt, run.theta), ...prompt.responses.at(n) };
    });
  });
  const tokens = run.rollout.flatMap((response) => response.tokens);
  const kl = sum(tokens.map((x) => logProb(x, ...run.old) - logProb(x, ...run.ref))) / run.rollout.length;
  const logprob_difference = mean(tokens.map((x) => Math.abs(logProb(x, ...run.old) - logProb(x, run.theta))));
  run.log.push({ ...exact(run.prompts, run.theta), kl, logprob_difference, steps: [] });
}

/** What the functions of estimators.js take. */
function batchOf({ settings: { method, k, bug, beta, right }, prompts, old, ref, rollout, theta, values }) {
  const other = (i) => (bug == "axis" ? (i % k) * prompts.length + Math.floor(i / k) : i);
  const responses = rollout.map(({ prompt, greedy, tokens: all }, i) => {
    const tokens = bug == "eos" ? all.slice(0, -1) : all;
    const under = (policy) => tokens.map((token) => logProb(token, ...policy));
    const [now, sampled, start] = [[theta], old, ref].map(under);
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

/** {advantages, weights, clipped} of the rollout, as in estimators.js: the weight of a token is its push. */
function pushes(run) {
  const { method, beta, bug } = run.settings;
  const batch = batchOf(run);
  const baseline = { baseline: 0, low_baseline: -10 }[bug];
  if (baseline != null && method == "reinforce") {
    const advantages = penalizedRewards(batch).map((x) => x - baseline);
    return reinforceLoss(batch, onTokens(batch, advantages), meanOverResponses);
  }
  const { weights, ...others } = ESTIMATORS[method](batch);
  const [isMean, isSum] = [OVER_LENGTH, SUMS].map((methods) => methods.includes(method));
  const share = isMean ? overLength : isSum ? meanOverResponses : meanOverTokens;
  const change = (response) => (x) => {
    if (bug == "kl_loss") return x - beta * share(batch, response); // the push of k1 is the same for all tokens
    if (bug != "length") return x;
    const T = response.logRatios.length;
    return x * (isMean ? T / LENGTH : LENGTH / T);
  };
  return { weights: weights.map((row, i) => row.map(change(batch.responses[i]))), ...others };
}

/** Minus the gradient of the loss in theta. A token pushes its own logit by (1 - p), the others of its choice by -p. */
function gradient(rollout, weights, theta) {
  const result = START.slice();
  rollout.forEach(({ tokens }, i) =>
    tokens.forEach(({ choice, option }, t) => {
      if (!choice || !weights[i][t]) return; // a masked EOS has no weight
      const ps = logProbs(choice, theta).map((x) => Math.exp(x));
      ps.forEach((p, n) => (result[choice.at + n] += weights[i][t] * ((n == option) - p)));
    }),
  );
  return result;
}

/** One step of SGD on the rollout. As in the scripts, a gradient longer than 1 is cut to 1. */
function step(run) {
  const { method, rate } = run.settings;
  const { weights, clipped } = pushes(run);
  const g = gradient(run.rollout, weights, run.theta).map((x) => rateFactor(method) * x);
  const norm = Math.hypot(...g);
  run.theta = run.theta.map((x, n) => x + (rate * g[n]) / Math.max(norm, 1));
  const entry = run.log.at(-1);
  entry.steps.push([norm, mean(clipped.flat().map(Number))]);
  [entry.grad_norm, entry.clip_fraction] = [0, 1].map((n) => mean(entry.steps.map((x) => x[n])));
}

/** The critic of ppo is a table: a tenth of the way from the value before each token to the return after it. */
function teachCritic(run) {
  const { beta, responses } = batchOf(run);
  responses.forEach((response, i) =>
    response.old.forEach((_, t) => {
      const before = run.rollout[i].tokens[t - 1] ?? run.rollout[i].prompt;
      const value = run.values.get(before) ?? 0;
      run.values.set(before, value + 0.1 * (response.reward - beta * klToGo(response, t) - value));
    }),
  );
}

function iterate(run) {
  for (let n = 0; n < run.settings.steps; n++) step(run);
  if (run.settings.method == "ppo") teachCritic(run);
  sample(run);
}

// --- the page ------------------------------------------------------------------------------------------------

const MYSTERIES = { mystery1: "ratio_reference", mystery2: "reference", mystery3: "temperature", mystery4: "none" };
const $ = (id) => document.getElementById(id);
let run; // in progress
let twin; // the same without the bug, if there is one
let before; // the run before
let waiting = 0; // rollouts that are still to come
let summary; // the text beside the buttons

const say = (text) => ($("said").textContent = text);
const both = (act) => [run, twin].forEach((x) => x && act(x));
const controls = () => [...$("train").querySelectorAll("select, input")];
const control = (name) => controls().find((x) => x.name == name);
const digits = (x) => (Math.abs(x) < 1e-4 ? "0" : Math.abs(x) < 0.1 ? x.toPrecision(2) : x.toFixed(2));
const shown = (x) => digits(x ?? 0).replace("-", "−");

/** A new run with the settings of the page. The one before it stays in grey. */
function begin() {
  if (run?.log.length > 5) before = run;
  const values = controls().map(({ name, value }) => [name, isNaN(value) ? value : Number(value)]);
  const { colour, bug, ...settings } = Object.fromEntries(values);
  run = newRun({ ...settings, bug: MYSTERIES[bug] ?? bug });
  twin = bug == "none" ? null : newRun({ ...settings, bug: "none" });
  waiting = 0;
  for (const name of ["method", "bug"]) $(`${name}-says`).textContent = control(name).selectedOptions[0].title;
  $("answer").hidden = !twin;
  $("answer").open = false;
  draw();
}

function load() {
  const wanted = new URLSearchParams(location.hash.slice(1));
  for (const element of controls()) {
    element.value = wanted.get(element.name) ?? element.dataset.start;
    if (!element.value) element.value = element.dataset.start; // not one of its options
  }
  begin();
  for (let n = Math.min(wanted.get("run") ?? 0, 500); n > 0; n--) both(iterate);
  draw();
}

/** The policy as bands, each as wide as the probability of what it leads to: {d, p, kind, tokens}, and its end. */
function bandsOf({ responses }, theta) {
  const [wide, trunk, top] = [32, 118, 26]; // the width of probability 1, the middle of the root, the path's upper edge
  const chance = (tokens) => Math.exp(logProbOf(tokens, theta));
  const bands = [];
  const band = (kind, tokens, x, y, toX, toY) => {
    const p = chance(tokens);
    const middle = y + (wide * p) / 2; // y is the upper edge where it begins, toY where it ends
    const end = toY + (wide * p) / 2;
    const bend = (x + toX) / 2;
    bands.push({ d: `M${x},${middle}C${bend},${middle} ${bend},${end} ${toX},${end}`, p, kind, tokens, x, toX, end });
    return wide * p;
  };
  const path = responses[0].tokens;
  const widths = path.map(({ text }) => 8 + 6.6 * text.length);
  let x = 70;
  const think = band("", path.slice(0, 1), 0, trunk - wide / 2, x, top);
  path.slice(1).forEach((_, t) => {
    const toX = x + (widths[t + 1] * 268) / sum(widths.slice(1));
    const width = band("right", path.slice(0, t + 2), x, top, toX, top);
    band("slip", responses[t + 1].tokens.slice(0, t + 2), x, top + width, x + 14, top + wide + 22);
    x = toX;
  });
  const guesses = responses.slice(path.length);
  band("", guesses[0].tokens.slice(0, 1), 0, trunk - wide / 2 + think, 90, 160);
  let y = 160;
  guesses.forEach(({ tokens, score }, d) => {
    y += band(score ? "right" : "wrong", tokens.slice(0, 2), 90, y, 210, 100 + 14 * d);
  });
  return bands;
}

function drawTree() {
  const bands = bandsOf(run.prompts[0], run.theta);
  const starts = bandsOf(run.prompts[0], START);
  const line = ({ d, p }, kind) => `<path class="${kind}" d="${d}" stroke-width="${Math.max(32 * p, 0.4)}"/>`;
  const write = (x, y, text, kind = "") => `<text x="${x}" y="${y}" class="${kind}">${text}</text>`;
  const texts = bands.map(({ kind, tokens, p, x, toX, end }, n) => {
    const { text } = tokens.at(-1);
    if (kind == "slip") return p > 0.013 ? write(toX, end + 12, shown(p), "middle light") : "";
    if (!kind) return n ? write(8, 210, `answer ${shown(p)}`) : write(toX, 17, `think ${shown(p)}`, "last");
    if (tokens[0].text == "answer") return write(toX + 5, end + 4, `${text} ${shown(p)}`, kind == "right" ? "good" : "");
    return write((x + toX) / 2, 17, text, "middle") + (text == "eos" ? write(toX + 4, end + 4, `✓ ${shown(p)}`, "good") : "");
  });
  const hits = bands.map(({ d, p, tokens }, n) => {
    const says = `${tokens.map(({ text }) => text).join(" ")}: probability ${shown(p)}, at the start ${shown(starts[n].p)}`;
    return `<path d="${d}" tabindex="-1" data-says="${says}"/>`;
  });
  const lines = [...starts.map((band) => line(band, "ghost")), ...bands.map((band) => line(band, band.kind))];
  $("tree").innerHTML = `${lines.join("")}${texts.join("")}<g class="hit">${hits.join("")}</g>`;
}

function drawRollout() {
  const { advantages, weights, clipped } = pushes(run);
  const rows = run.rollout.map(({ tokens, prompt }, i) =>
    tokens.map((token, t) => {
      const [p, push] = [Math.exp(logProb(token, run.theta)), weights[i][t] ?? 0];
      const value = run.values.get(tokens[t - 1] ?? prompt);
      const critic = value == null ? "" : `, critic's value before it ${shown(value)}`;
      const numbers = `p ${p.toFixed(4)}, push ${shown(push)}, push × (1 − p) ${shown(push * (1 - p))}${critic}`;
      return { text: token.text, size: control("colour").value == "push" ? push : push * (1 - p), numbers, cut: clipped[i][t] };
    }),
  );
  const largest = Math.max(1e-12, ...rows.flat().map(({ size }) => Math.abs(size)));
  const cell = ({ text, size, numbers, cut }) => {
    const kind = cut ? "cut" : size > 0 ? "up" : "down";
    const part = Math.round((100 * Math.abs(size)) / largest);
    return `<i class="${kind}" style="--part: ${part}%" tabindex="-1" data-says="${text}: ${numbers}">${text}</i>`;
  };
  const html = run.rollout.map(({ prompt, score }, i) => {
    const head = i % run.settings.k || run.prompts.length == 1 ? "" : `<b>${prompt.prompt}</b>`;
    const mark = score ? `<span class="good">✓ ${run.settings.right}</span>` : "<span>✗ 0</span>";
    const cells = rows[i].map(cell).join("");
    return `${head}<div>${mark}<span>${shown(mean(advantages[i]))}</span><span class="tokens">${cells}</span></div>`;
  });
  $("rows").innerHTML = html.join("");
  $("strongest").textContent = shown(largest);
}

/** Each figure of the page names its numbers. Grey lines come first, so that they lie below. */
function drawCurves() {
  const logs = [(twin ?? before)?.log ?? [], run.log];
  const longest = Math.max(101, ...logs.map((log) => log.length));
  const end = mean(run.prompts.map(({ responses }) => -logProbOf(responses[0].tokens, START)));
  for (const figure of $("curves").querySelectorAll("figure")) {
    const { keys, top } = figure.dataset;
    const series = logs.map((log) => keys.split(" ").map((key) => log.map((entry) => entry[key] ?? NaN)));
    const values = series.flat(2).filter((x) => !isNaN(x));
    const [low, high] = [Math.min(0, ...values), Math.max(top, ...values)];
    const y = (value) => 48 - (46 * (value - low)) / (high - low);
    const point = (value, n) => (isNaN(value) ? "" : `${(100 * n) / (longest - 1)},${y(value)}`);
    const line = (kind) => (xs, n) => `<polyline class="${"ab"[n]} ${kind}" points="${xs.map(point).join(" ")}"/>`;
    const mark = keys == "distance" ? `<line x2="100" y1="${y(end)}" y2="${y(end)}"/>` : "";
    const lines = [...series[0].map(line("grey")), ...series[1].map(line(""))];
    figure.querySelector("svg").innerHTML = mark + lines.join("");
    figure.querySelector("figcaption").dataset.high = shown(high);
    const outputs = figure.querySelectorAll("output");
    series[1].forEach((xs, n) => (outputs[n].textContent = shown(xs.findLast((x) => !isNaN(x)))));
  }
}

/** As in docs/bugs.md: how much of the rise in accuracy is left; and which metrics are off by a factor of three. */
function drawVerdict() {
  const [rise, clean] = [run, twin].map(({ log }) => log.at(-1).accuracy - log[0].accuracy);
  const kind = rise >= 0.97 * clean ? "silent" : rise >= 0.4 * clean ? "slow" : "loud";
  const isOff = (key) => {
    const [a, b] = [run, twin].map(({ log }) => mean(log.map((entry) => Math.abs(entry[key] ?? 0))));
    return Math.max(a, b) > 1e-3 && (a > 3 * b || b > 3 * a);
  };
  const off = ["kl", "grad_norm", "logprob_difference", "clip_fraction"].filter(isOff);
  const name = control("bug").querySelector(`[value=${run.settings.bug}]`).textContent;
  const same = run.theta.every((x, n) => x == twin.theta[n]) ? " It has changed no weight so far." : "";
  $("verdict").textContent =
    `The bug: ${name}. Accuracy has risen by ${shown(rise)}, without the bug by ${shown(clean)}: ${kind}.${same} ` +
    `Metrics whose mean is off by a factor of three: ${off.join(", ") || "none"}.`;
}

function draw() {
  const { think, accuracy } = run.log.at(-1);
  drawTree();
  drawRollout();
  drawCurves();
  if (twin) drawVerdict();
  $("run").textContent = waiting ? "Pause" : "Run";
  summary = `Rollout ${run.log.length - 1}: P(think) ${shown(think)}, accuracy ${shown(accuracy)}`;
  say(summary);
  const changed = controls().filter(({ value, dataset }) => value != dataset.start);
  history.replaceState(null, "", `#${changed.map(({ name, value }) => `${name}=${value}`).join("&")}`);
}

/** Train until 100 more rollouts are done, or somebody stops it. */
function play() {
  if (waiting) both(iterate), waiting--, setTimeout(play, 40);
  draw();
}

/** Does another seed tell the same story? */
async function trySeeds() {
  let text = "";
  for (const { settings } of twin ? [run, twin] : [run]) {
    const ends = [];
    for (let seed = 1; seed <= 20; seed++) {
      const other = newRun({ ...settings, seed });
      for (let n = 0; n < 100; n++) iterate(other);
      ends.push(other.log.at(-1));
      say(`${text} Seed ${seed} of 20 …`);
      await new Promise((done) => setTimeout(done));
    }
    const [think, lucky] = ["think", "lucky"].map((key) => ends.filter((end) => end[key] > 0.5).length);
    const scores = ends.map((end) => end.accuracy);
    text += `${text ? " Without the bug" : "20 seeds"}: thinking wins ${think} times, the lucky guess ${lucky}; `;
    text += `accuracy ${shown(mean(scores))} (${shown(Math.min(...scores))} to ${shown(Math.max(...scores))}).`;
  }
  say((summary = text));
}

for (const element of controls()) element.dataset.start = element.value;
$("settings").onchange = begin;
control("colour").onchange = draw;
$("run").onclick = () => ((waiting = waiting ? 0 : 100), play());
$("step").onclick = () => (both(step), draw());
$("sample").onclick = () => (both(sample), draw());
$("again").onclick = begin;
$("seeds").onclick = trySeeds;
for (const kind of ["pointerover", "focusin"])
  $("train").addEventListener(kind, ({ target }) => say(target.dataset?.says ?? summary));
// In the tree and the rollout, the arrow keys go from number to number.
$("train").onkeydown = (event) => {
  const way = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  const all = [...(event.target.closest("#tree, #rows")?.querySelectorAll("[data-says]") ?? [])];
  if (!way || !all.length) return;
  event.preventDefault();
  event.stopPropagation();
  all.at((all.indexOf(event.target) + way + all.length) % all.length).focus();
};
$("settings").open = innerWidth > 900;
addEventListener("hashchange", load);
load();
