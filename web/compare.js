// The page Compare: two scripts side by side, on a phone below each other. What is in capitals comes from data.js.
const $ = (id) => document.getElementById(id);
const CONTEXT = 3; // equal lines that stay visible before and after a change
let at; // the change that the keys have reached, or -1
const textOf = (number) => LINES[number].replace(/<[^>]*>/g, "");

/** The lines from first to end of a script, as a column. */
function column(side, name, first, end) {
  const lines = SCRIPTS[name].lines.slice(first, end).map((number, i) => {
    const indent = textOf(number).search(/\S|$/);
    return `<div class="line" data-n="${first + i + 1}" style="--indent:${indent + 2}ch">${LINES[number]}</div>`;
  });
  return `<div class="${side}">${lines.join("")}</div>`;
}

/** The function or class that a line stands in. */
function place(name, line) {
  const heads = SCRIPTS[name].lines.slice(0, line + 1).map((number) => textOf(number).match(/^(def|class) \w+/));
  return heads.findLast((head) => head)?.[0] ?? "";
}

/** The changes, cut in two where both docstrings end: up to there and from there on. */
function parts(a, b) {
  const ends = [SCRIPTS[a].head, SCRIPTS[b].head];
  const cut = (from, to) => ([a0, a1, b0, b1]) =>
    [Math.max(a0, from[0]), Math.min(a1, to[0]), Math.max(b0, from[1]), Math.min(b1, to[1])];
  const isSome = ([a0, a1, b0, b1]) => a0 <= a1 && b0 <= b1 && (a0 < a1 || b0 < b1);
  const part = (from, to) => HUNKS[`${a}..${b}`].map(cut(from, to)).filter(isSome);
  return [part([0, 0], ends), part(ends, [Infinity, Infinity])];
}

/** The lines between two places. Equal lines are folded, but for those beside a change. */
function draw(a, b, changes, [startA, startB], [endA, endB]) {
  const rows = (kind, a0, a1, b0, b1) =>
    `<div class="${kind}">${column("a", a, a0, a1)}${column("b", b, b0, b1)}</div>`;
  let [html, doneA, doneB] = ["", startA, startB];
  for (const [a0, a1, b0, b1] of [...changes, [endA, endA, endB, endB]]) {
    const same = (first, end) => rows("same", first - doneB + doneA, end - doneB + doneA, first, end);
    const from = doneB == startB ? doneB : doneB + CONTEXT; // what is folded
    const to = b0 == endB ? b0 : b0 - CONTEXT;
    const summary = `<summary>${to - from} equal lines <span>${place(b, b0)}</span></summary>`;
    const fold = () => `${same(doneB, from)}<details>${summary}${same(from, to)}</details>${same(to, b0)}`;
    html += to - from > 1 ? fold() : same(doneB, b0);
    if (a0 < a1 || b0 < b1) html += rows("hunk", a0, a1, b0, b1);
    [doneA, doneB] = [a1, b1];
  }
  return html;
}

/** Both scripts. What stands up to the end of the docstring is folded to one line. */
function drawBoth(a, b) {
  const [heads, others] = parts(a, b);
  const ends = [SCRIPTS[a].head, SCRIPTS[b].head];
  const all = [a, b].map((name) => SCRIPTS[name].lines.length);
  const summary = `<summary>Docstring: ${sizeOf(heads)} lines differ <span>show</span></summary>`;
  $("diff").innerHTML = `<details class="head">${summary}${draw(a, b, heads, [0, 0], ends)}</details>` +
    draw(a, b, others, ends, all);
}

const hunks = () => [...$("diff").querySelectorAll(":not(details:not([open])) > .hunk")];

/** The words and signs of a column, each with the space behind it. */
function words(column) {
  const found = [];
  const walker = document.createTreeWalker(column, NodeFilter.SHOW_TEXT);
  for (let node; (node = walker.nextNode()); )
    for (const { 0: text, index } of node.data.matchAll(/(\w+|[^\w\s])\s*/g)) {
      const ends = { startContainer: node, startOffset: index, endContainer: node, endOffset: index + text.length };
      found.push({ text: text.trim(), range: new StaticRange(ends) });
    }
  return found;
}

/** Mark the words that changes take out and put in; none where most differ: there the colour of the lines says so. */
function markWords() {
  const marks = { gone: new Highlight(), new: new Highlight() };
  for (const hunk of hunks()) {
    const [a, b] = [...hunk.children].map(words);
    if (a.length * b.length > 1e6) continue;
    // longest[i][j]: how many words a from i on and b from j on have in common, in order
    const longest = Array.from({ length: a.length + 1 }, () => Array(b.length + 1).fill(0));
    const isSame = (i, j) => a[i]?.text == b[j]?.text;
    for (let i = a.length - 1; i >= 0; i--)
      for (let j = b.length - 1; j >= 0; j--)
        longest[i][j] = isSame(i, j) ? longest[i + 1][j + 1] + 1 : Math.max(longest[i + 1][j], longest[i][j + 1]);
    if (longest[0][0] < (a.length + b.length) / 4) continue;
    for (let i = 0, j = 0; i < a.length || j < b.length; ) {
      if (isSame(i, j)) i++, j++;
      else if (j == b.length || longest[i + 1]?.[j] >= longest[i][j + 1]) marks.gone.add(a[i++].range);
      else marks.new.add(b[j++].range);
    }
  }
  for (const [name, ranges] of Object.entries(marks)) CSS.highlights.set(name, ranges);
}

/** Show a change, or with -1 none. */
function go(to) {
  at = to;
  const all = hunks();
  all.forEach((hunk, i) => hunk.classList.toggle("here", i == at));
  all[at]?.scrollIntoView();
  $("at").textContent = at < 0 ? `${all.length} changes` : `${at + 1} of ${all.length}`;
}

/** Go to the next change (1) or the one before (-1), from the last one or, once it is out of sight, from here. */
function move(step) {
  const tops = hunks().map((hunk) => hunk.getBoundingClientRect().top);
  const above = tops.filter((top) => top < $("moves").getBoundingClientRect().bottom).length;
  const to = tops[at] >= 0 && tops[at] < innerHeight ? at + step : above - (step < 0);
  go((to + tops.length) % tops.length);
}

function unfold(open) {
  for (const details of $("diff").querySelectorAll("details")) details.open = open;
  $("fold").setAttribute("aria-pressed", open);
}

const sizeOf = (changes) => changes.reduce((sum, [a0, a1, b0, b1]) => sum + a1 - a0 + b1 - b0, 0);

/** How many lines of each kind differ. */
function counted(a, b) {
  const counts = { m: 0 };
  for (const [a0, a1, b0, b1] of HUNKS[`${a}..${b}`])
    for (const kind of SCRIPTS[a].kinds.slice(a0, a1) + SCRIPTS[b].kinds.slice(b0, b1))
      counts[kind] = (counts[kind] ?? 0) + 1;
  return counts;
}

/** The same in words. */
function kinds(a, b) {
  const [names, counts] = [{ m: "the method", c: "the other code", f: "flags", t: "text" }, counted(a, b)];
  const found = Object.keys(names).filter((kind) => counts[kind]);
  return found.map((kind, i) => `${counts[kind]}${i ? "" : " lines"} of ${names[kind]}`).join(", ");
}

/** A table of all pairs of methods with the number of lines of the method that differ, and the names of all scripts to choose from. */
function drawPairs() {
  const cell = (a, b) => {
    if (a == b) return "<td></td>";
    const { m } = counted(a, b);
    return `<td style="--share:${Math.min(m, 100)}%"><a href="#${a}..${b}">${m}</a></td>`; // how strong the color is
  };
  const head = METHODS.map((name) => `<th scope="col"><span>${name}</span></th>`);
  const row = (a) => `<tr><th scope="row">${a}</th>${METHODS.map((b) => cell(a, b)).join("")}</tr>`;
  $("matrix").innerHTML =
    `<table class="matrix"><thead><tr><th></th>${head.join("")}</tr></thead>${METHODS.map(row).join("")}</table>`;
  for (const side of ["a", "b"])
    $(side).insertAdjacentHTML("beforeend", Object.keys(SCRIPTS).map((name) => `<option>${name}</option>`).join(""));
}

/** What the address says: two scripts, or else all pairs. */
function show() {
  const wanted = location.hash.slice(1);
  const isKnown = Object.hasOwn(HUNKS, wanted);
  const [a, b] = isKnown ? wanted.split("..") : ["", ""];
  document.body.classList.toggle("two", isKnown);
  document.title = wanted || "Compare two scripts";
  $("unknown").textContent = isKnown || !wanted ? "" : `There are no two scripts "${wanted}".`;
  [$("a").value, $("b").value] = [a, b];
  if (!isKnown) return;
  $("count").textContent = kinds(a, b);
  const title = ({ path, title }) => `<p><a href="${path}.html">${path}</a> ${title}</p>`;
  $("titles").innerHTML = title(SCRIPTS[a]) + title(SCRIPTS[b]);
  drawBoth(a, b);
  unfold(false);
  markWords();
  scrollTo(0, 0);
  go(-1);
}

const choose = (a, b) => a && b && (location.hash = `${a}..${b}`);
$("a").onchange = $("b").onchange = () => choose($("a").value, $("b").value);
$("swap").onclick = () => choose($("b").value, $("a").value);
$("next").onclick = () => move(1);
$("previous").onclick = () => move(-1);
$("fold").onclick = () => unfold($("fold").getAttribute("aria-pressed") == "false");
const keys = { n: "next", p: "previous", o: "fold" };
const press = (event) => {
  const isElsewhere = event.target.closest("input, select") || event.ctrlKey || event.metaKey || event.altKey;
  if (isElsewhere || !document.body.matches(".two") || !Object.hasOwn(keys, event.key)) return;
  event.stopImmediatePropagation(); // the theme turns pages with n and p
  $(keys[event.key]).click();
};
addEventListener("keydown", press, true);
// A selection stays on the side where it begins.
$("diff").onpointerdown = ({ target }) => ($("diff").dataset.select = target.closest(".a, .b")?.className);
addEventListener("hashchange", show);
drawPairs();
show();
