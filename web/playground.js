// The page Playground: what the scripts make of one group of responses. LINES and SCRIPTS come from data.js, and from
// estimators.js the estimators, presets, sum and mean.

const $ = (id) => document.getElementById(id);
const NAMES = Object.keys(SCRIPTS).filter((name) => Object.hasOwn(ESTIMATORS, name));
const LARGEST = 0.6; // log-ratio that a slider reaches

let group; // see batchOf
let pinned; // one or two names of scripts, or none
let results = {}; // what each estimator returns for the group
let chosen = null; // the token that its response's slider moves, as [response, token]

const k = () => group.prompts[0].responses.length;
const responses = () => group.prompts.flatMap((prompt) => prompt.responses);
const longest = () => Math.max(...responses().map((response) => response.logRatios.length));
const minus = (text) => String(text).replace("-", "−");
const isZero = (x) => Math.abs(x) < 1e-9;
const near = (x, y) => Math.abs(x - y) <= 0.005 * Math.max(Math.abs(x), Math.abs(y)) + 1e-9;

/** A1 to A8, then B1 to B8. */
const nameOf = (i) => "AB"[Math.floor(i / k())] + ((i % k()) + 1);

/** Two or three digits that matter. */
function shown(x) {
  if (isZero(x)) return "0";
  return minus(Math.abs(x) >= 100 ? x.toFixed(0) : Number(x.toPrecision(Math.abs(x) < 0.1 ? 2 : 3)));
}

/** One number where all tokens have the same, else the smallest and the largest. */
function range(values) {
  const [low, high] = [Math.min(...values), Math.max(...values)].map(shown);
  return low == high ? low : `${low} to ${high}`;
}

// --- the address ---------------------------------------------------------------------------------------------

const copy = (state) => JSON.parse(JSON.stringify(state));
const samePreset = () =>
  Object.keys(PRESETS).find((name) => JSON.stringify(PRESETS[name].group) == JSON.stringify(group));

/** Equal neighbours as one: [count, value]. */
function runs(values) {
  const found = [];
  for (const value of values) {
    if (found.length && found.at(-1)[1] == value) found.at(-1)[0]++;
    else found.push([1, value]);
  }
  return found;
}

function formatResponses(list) {
  const tokens = (xs) => runs(xs).map(([count, x]) => (x ? `${count}*${x}` : count));
  const texts = runs(list.map(({ reward, logRatios }) => [reward, ...tokens(logRatios)].join("_")));
  return texts.map(([count, text]) => (count > 1 ? `${count}x${text}` : text)).join(",");
}

function address() {
  const [a, b] = group.prompts;
  const preset = samePreset();
  const greedy = `${a.greedy},${b.greedy}`;
  const text = preset
    ? `preset=${preset}`
    : `a=${formatResponses(a.responses)}&b=${formatResponses(b.responses)}&greedy=${greedy}&teacher=${group.teacher}`;
  return `#${text}&pin=${pinned.join(",")}`;
}

const isNumber = (x) => Number.isFinite(x) && Math.abs(x) <= 1e6;
const isResponse = ({ reward, logRatios: xs }) =>
  isNumber(reward) && xs.length >= 1 && xs.length <= MAX_LENGTH && xs.every((x) => Math.abs(x) <= 3);

function isGroup({ prompts: [a, b], teacher }) {
  const [count, other] = [a.responses.length, b.responses.length];
  const isRight = [...a.responses, ...b.responses].every(isResponse) && [a.greedy, b.greedy].every(isNumber);
  return count >= 2 && count <= 8 && count == other && isRight && teacher > 0 && teacher <= 1;
}

/** What an address says, or null where it makes no sense. */
function parse(hash) {
  const fields = Object.fromEntries(hash.split("&").map((field) => field.split("=")));
  const pins = (fields.pin ?? "grpo,dr_grpo").split(",").filter((name) => name);
  const isKnown = (name) => Object.hasOwn(SCRIPTS, name);
  if (!pins.every(isKnown)) return null;
  const pinned = pins.filter((name) => NAMES.includes(name)).slice(0, 2);
  if (!("a" in fields || "b" in fields)) {
    const name = fields.preset ?? "length";
    return Object.hasOwn(PRESETS, name) ? { group: copy(PRESETS[name].group), pinned } : null;
  }
  const greedy = (fields.greedy ?? "0,0").split(",").map(Number);
  const a = { greedy: greedy[0], responses: parseResponses(fields.a ?? "") };
  const b = { greedy: greedy[1], responses: parseResponses(fields.b ?? "") };
  const made = { prompts: [a, b], teacher: Number(fields.teacher ?? 0.8) };
  return isGroup(made) ? { group: made, pinned } : null;
}

let saving;
/** Write the address a little later: a browser refuses to do so for every step of a slider. */
function save() {
  clearTimeout(saving);
  saving = setTimeout(() => history.replaceState(null, "", address()), 200);
}

function load() {
  clearTimeout(saving);
  // A chat program may have escaped the commas and stars.
  const hash = location.hash.slice(1).replace(/%([0-9a-f]{2})/gi, (_, hex) => String.fromCharCode(parseInt(hex, 16)));
  const state = parse(hash);
  $("unknown").textContent = state ? "" : "The address is not understood, so here is the first preset.";
  ({ group, pinned } = state ?? parse(""));
  chosen = null;
  drawEditor();
  orderCards();
  update();
  history.replaceState(null, "", address()); // at once: the theme's script fails where an escape is broken
}

// --- the editor ----------------------------------------------------------------------------------------------

const cell = (x, size, cut) => {
  const part = size ? Math.abs(x) / size : 0;
  const kind = cut ? "cut" : part < 1e-6 ? "" : x > 0 ? "up" : "down";
  return `<i class="${kind}" style="--part:${Math.round(12 + 88 * part)}%"></i>`;
};

function drawEditor() {
  $("k").value = k();
  $("teacher").value = group.teacher;
  $("group").innerHTML = group.prompts
    .map(({ greedy, responses }, p) => {
      const name = "AB"[p];
      const rows = responses.map(({ reward, logRatios }, n) => {
        const i = p * k() + n;
        const label = `${nameOf(i)}: `;
        return `<div class="response" data-i="${i}"><b>${nameOf(i)}</b>
          <input class="reward" type="number" step="any" value="${reward}" aria-label="${label}reward">
          <input class="length" type="number" min="1" max="${MAX_LENGTH}" value="${logRatios.length}"
            aria-label="${label}tokens">
          <span class="tokens" role="group" aria-label="${label}tokens, arrow keys change them"></span>
          <input class="ratio" type="range" min="${-LARGEST}" max="${LARGEST}" step="0.01">
          <span><output></output><button class="all" hidden>all</button></span></div>`;
      });
      return `<section><h2>Prompt ${name}
        <label>reward of the greedy answer (only remax.py uses it) <input class="greedy" data-p="${p}" type="number"
          step="any" value="${greedy}"></label></h2>
        <div class="response head"><span></span><span>reward</span><span>tokens</span>
        <span class="tokens">log-ratio log(π/π_old) of each token</span><span></span><span>log-ratio</span></div>
        ${rows.join("")}</section>`;
    })
    .join("");
  responses().forEach((_, i) => drawResponse(i));
}

/** The tokens of a response in the editor, and its slider. */
function drawResponse(i) {
  const row = $("group").querySelector(`[data-i="${i}"]`);
  const { logRatios } = responses()[i];
  const focused = row.contains(document.activeElement) ? document.activeElement.dataset?.t : undefined;
  const token = chosen?.[0] == i ? chosen[1] : null;
  const buttons = logRatios.map((x, t) => {
    const state = `aria-pressed="${t == token}" tabindex="${t == (token ?? 0) ? 0 : -1}"`;
    const label = `${nameOf(i)}, token ${t + 1}: log-ratio ${minus(x)}`;
    return `<button data-t="${t}" ${state} aria-label="${label}" title="${label}">${cell(x, LARGEST)}</button>`;
  });
  row.querySelector(".tokens").innerHTML = buttons.join("");
  const value = token == null ? mean(logRatios) : logRatios[token];
  const who = token == null ? "all tokens" : `token ${token + 1}`;
  const slider = row.querySelector(".ratio");
  slider.value = value;
  slider.setAttribute("aria-label", `${nameOf(i)}: log-ratio of ${who}`);
  const text = token == null ? range(logRatios).replace(" to ", "…") : `log-ratio of ${who}: ${minus(value)}`;
  row.querySelector("output").textContent = text;
  row.querySelector(".all").hidden = token == null;
  if (focused !== undefined) row.querySelector(`[data-t="${Math.min(focused, logRatios.length - 1)}"]`).focus();
}

const rowOf = (element) => Number(element.closest(".response").dataset.i);

function setLogRatio(i, t, value) {
  const x = Math.round(100 * Math.min(Math.max(value, -LARGEST), LARGEST)) / 100 || 0;
  const { logRatios } = responses()[i];
  logRatios.forEach((_, s) => (t == null || s == t) && (logRatios[s] = x));
  drawResponse(i);
  update();
}

function choose(i, t) {
  const before = chosen;
  chosen = before?.[0] == i && before[1] == t ? null : [i, t];
  if (before && before[0] != i) drawResponse(before[0]);
  drawResponse(i);
}

$("group").oninput = ({ target }) => {
  const value = target.valueAsNumber;
  if (target.type != "range" && !isNumber(value)) return; // while one types
  if (target.matches(".greedy")) group.prompts[target.dataset.p].greedy = value;
  else {
    const i = rowOf(target);
    const response = responses()[i];
    if (target.matches(".ratio")) return setLogRatio(i, chosen?.[0] == i ? chosen[1] : null, value);
    if (target.matches(".reward")) response.reward = value;
    if (target.matches(".length")) {
      const length = Math.min(Math.max(Math.round(value), 1), MAX_LENGTH);
      const last = response.logRatios.at(-1);
      response.logRatios = Array.from({ length }, (_, t) => response.logRatios[t] ?? last);
      chosen = null;
      responses().forEach((_, other) => drawResponse(other));
    }
  }
  update();
};
// A field that was left empty or out of bounds shows what counts.
$("group").onchange = ({ target }) => {
  if (target.matches(".greedy")) target.value = group.prompts[target.dataset.p].greedy;
  if (target.matches(".reward")) target.value = responses()[rowOf(target)].reward;
  if (target.matches(".length")) target.value = responses()[rowOf(target)].logRatios.length;
};
$("group").onclick = ({ target }) => {
  const button = target.closest("[data-t]");
  if (button) choose(rowOf(button), Number(button.dataset.t));
  if (!target.matches(".all")) return;
  target.closest(".response").querySelector(".ratio").focus();
  choose(...chosen);
};
// Escape, or a click outside its row, releases the token: before a click redraws what it hits.
addEventListener("keydown", ({ key }) => key == "Escape" && chosen && choose(...chosen));
const release = ({ target }) => chosen && !target.closest(`.response[data-i="${chosen[0]}"]`) && choose(...chosen);
addEventListener("click", release, true);
$("group").onkeydown = (event) => {
  const { target, key } = event;
  if (!target.matches("[data-t]")) return;
  const [i, t] = [rowOf(target), Number(target.dataset.t)];
  const step = { ArrowUp: 0.05, ArrowDown: -0.05 }[key];
  if (step) setLogRatio(i, t, responses()[i].logRatios[t] + step);
  else if (key == "ArrowRight") target.nextElementSibling?.focus();
  else if (key == "ArrowLeft") target.previousElementSibling?.focus();
  else return;
  event.preventDefault();
};

$("k").onchange = ({ target }) => {
  const count = Math.min(Math.max(Math.round(target.valueAsNumber || k()), 2), 8);
  for (const { responses: list } of group.prompts) {
    while (list.length < count) list.push({ reward: 0, logRatios: Array(8).fill(0) });
    list.splice(count);
  }
  chosen = null;
  drawEditor();
  update();
};
$("teacher").oninput = ({ target }) => {
  const value = target.valueAsNumber;
  if (!(value > 0 && value <= 1)) return;
  group.teacher = value;
  update();
};
$("teacher").onchange = ({ target }) => (target.value = group.teacher);

const buttons = Object.entries(PRESETS).map(([name, { title }]) => `<button data-preset="${name}">${title}</button>`);
$("presets").innerHTML = buttons.join("");
$("play").querySelector("details").open = matchMedia("(min-width: 900px)").matches;
$("presets").onclick = ({ target }) => {
  const name = target.dataset.preset;
  if (!name) return;
  clearTimeout(saving);
  history.pushState(null, "", `#preset=${name}&pin=${pinned.join(",")}`);
  load();
};

// --- the scripts ---------------------------------------------------------------------------------------------

/** The lines of a function in colours, with its decorator. Two blank lines end it. */
function functionOf(name, wanted) {
  const source = SCRIPTS[name].lines.map((number) => LINES[number]).join("\n");
  return source.match(new RegExp(`^(?:.+\\n)?.*"nf">${wanted}<[\\s\\S]*?(?=\\n\\n\\n)`, "m"))[0];
}

for (const name of NAMES) {
  const card = document.createElement("article");
  card.dataset.script = name;
  card.innerHTML = `<header><h2>${name}.py</h2>
    <button class="code" aria-expanded="false">code</button>
    <button class="pin" aria-pressed="false" aria-label="pin ${name}.py">pin</button></header>
    <p class="title">${SCRIPTS[name].title}</p><p class="scale"></p><div class="cells"></div>
    <div class="source" hidden><p><a href="${SCRIPTS[name].path}.html">All of ${name}.py</a></p>
    <pre class="highlight" tabindex="0"></pre></div>`;
  const source = ["compute_advantages", "policy_loss"].map((wanted) => functionOf(name, wanted));
  card.querySelector("pre").innerHTML = source.join("\n\n\n");
  card.onclick = ({ target }) => {
    if (target.matches(".pin")) return pin(name);
    if (target.closest(".source") || getSelection().toString()) return;
    const box = card.querySelector(".source");
    box.hidden = !box.hidden;
    const button = card.querySelector(".code");
    button.setAttribute("aria-expanded", !box.hidden);
    button.textContent = box.hidden ? "code" : "hide code";
  };
  // The numbers of a token, once somebody points at it.
  card.onpointerover = ({ target }) => {
    if (!target.matches(".cells i")) return;
    const i = Number(target.closest(".row").dataset.i);
    const t = [...target.parentElement.children].indexOf(target);
    const { advantages, weights, stops } = results[name];
    const numbers = `advantage ${shown(advantages[i][t])}, push ${shown(weights[i][t])}`;
    const why = `The policy has already moved too far on this ${stops}.`;
    target.title = `${nameOf(i)}, token ${t + 1}: ${numbers}. ${target.matches(".cut") ? why : ""}`;
  };
  $("scripts").append(card);
}

const cardOf = (name) => $("scripts").querySelector(`[data-script="${name}"]`);

/** Pinned scripts come first. */
function orderCards() {
  const others = NAMES.filter((name) => !pinned.includes(name));
  const focused = document.activeElement;
  $("scripts").append(...[...pinned, ...others].map(cardOf));
  if ($("scripts").contains(focused)) focused.focus();
  for (const name of NAMES) {
    const button = cardOf(name).querySelector(".pin");
    button.setAttribute("aria-pressed", pinned.includes(name));
    button.textContent = pinned.includes(name) ? "unpin" : "pin";
  }
}

function pin(name) {
  pinned = pinned.includes(name) ? pinned.filter((other) => other != name) : [...pinned, name].slice(-2);
  orderCards();
  update();
}

/** How the pushes of a script relate to those of another one, where they agree up to a factor; else nothing. */
function comparison(weights, others, other) {
  const [mine, theirs] = [weights.flat(), others.flat()];
  const n = theirs.findIndex((x) => !isZero(x));
  const factor = mine[n] / theirs[n];
  if (n < 0 || isZero(mine[n]) || !mine.every((x, t) => near(x, factor * theirs[t]))) return "";
  if (near(factor, 1)) return `Same pushes as ${other}.`;
  const size = Math.abs(factor);
  const inverse = Math.round(1 / size);
  const times = inverse > 1 && near(1 / size, inverse) ? `1/${inverse}` : `${shown(size)} times`;
  return `Same pattern as ${other}, ${times} as large${factor < 0 ? " in the other direction" : ""}.`;
}

function drawCard(name) {
  const { advantages, weights, clipped } = results[name];
  const largest = (lists) => Math.max(...lists.flat().map(Math.abs));
  const [most, mostPush] = [largest(advantages), largest(weights)].map((x) => (isZero(x) ? 0 : x));
  const rows = advantages.map((own, i) => {
    const cells = own.map((x) => cell(x, most)).join("");
    const cut = own.map((x, t) => clipped[i][t] && !isZero(x));
    const pushes = weights[i].map((x, t) => cell(x, mostPush, cut[t])).join("");
    const count = cut.filter((x) => x).length;
    const perToken = `push of a token ${range(weights[i])}${count ? `, ${count} hatched` : ""}`;
    return `<div class="row" data-i="${i}"><b>${nameOf(i)}</b>
      <span class="strip advantages" role="img" aria-label="advantage ${range(own)}">${cells}</span>
      <span class="number">${shown(mean(own))}</span>
      <span class="strip pushes" role="img" aria-label="${perToken}">${pushes}</span>
      <span class="number">${shown(sum(weights[i]))}</span></div>`;
  });
  const head = `<div class="row head"><span></span><span>advantage<br>per token</span><span class="number">mean</span>
    <span>push<br>per token</span><span class="number">whole<br>response</span></div>`;
  const [a, b] = [rows.slice(0, k()), rows.slice(k())].map((own) => `<div>${head}${own.join("")}</div>`);
  const card = cardOf(name);
  card.querySelector(".cells").innerHTML = a + b;
  const other = pinned.length == 2 && pinned.includes(name) && pinned.find((x) => x != name);
  const same = other ? comparison(weights, results[other].weights, `${other}.py`) : "";
  card.querySelector(".scale").innerHTML = `Strongest push on a token: ${shown(mostPush)}. <b>${same}</b>`;
}

let waiting = false;
/** Compute and draw all scripts, at most once per frame. */
function update() {
  const name = samePreset();
  for (const button of $("presets").querySelectorAll("button"))
    button.setAttribute("aria-pressed", button.dataset.preset == name);
  // A changed group hides the sentences, and keeps their place: nothing moves under the pointer.
  if (name) $("says").textContent = PRESETS[name].says;
  $("says").style.visibility = name ? "visible" : "hidden";
  $("play").style.setProperty("--longest", longest());
  save();
  if (waiting) return;
  waiting = true;
  requestAnimationFrame(() => {
    waiting = false;
    const batch = batchOf(group);
    for (const script of NAMES) results[script] = ESTIMATORS[script](batch);
    NAMES.forEach(drawCard);
  });
}

addEventListener("popstate", load);
load();
