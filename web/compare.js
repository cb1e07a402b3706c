// The page Compare: two scripts side by side, or in one column. SCRIPTS and HUNKS come from data.js.
import { python } from "@codemirror/lang-python";
import { forceParsing, syntaxHighlighting } from "@codemirror/language";
import { Chunk, getChunks, MergeView, presentableDiff, unifiedMergeView } from "@codemirror/merge";
import { Compartment, EditorState } from "@codemirror/state";
import { Decoration, EditorView, lineNumbers } from "@codemirror/view";
import { classHighlighter } from "@lezer/highlight";

const $ = (id) => document.getElementById(id);
const narrow = matchMedia("(max-width: 899px)");
const here = new Compartment(); // marks the change that the keyboard is at
let merge; // what is shown: a MergeView of two editors, or one editor
let views = [];
let at = -1;
let open = false;

/** The text that differs inside a hunk; none where most does, since the colour of the lines says so. */
function changesInside(a, b) {
  const changes = presentableDiff(a, b, { scanLimit: 500 });
  const changed = changes.reduce((sum, c) => sum + c.toA - c.fromA + c.toB - c.fromB, 0);
  return changed < 0.6 * (a.length + b.length) ? changes : [];
}

// The library looks for changes itself, and takes a blank line between two of them for changed. Here it is
// given those of `diff`, so that the page shows what a terminal does.
Chunk.build = (a, b, { hunks }) => {
  const start = (doc, line) => (line < doc.lines ? doc.line(line + 1).from : doc.length + 1);
  return hunks.map(([a0, a1, b0, b1]) => {
    const [fromA, toA, fromB, toB] = [start(a, a0), start(a, a1), start(b, b0), start(b, b1)];
    const both = a0 < a1 && b0 < b1;
    const inside = both ? changesInside(a.sliceString(fromA, toA - 1), b.sliceString(fromB, toB - 1)) : [];
    return new Chunk(inside, fromA, toA, fromB, toB);
  });
};

/** Lines that do not fit are wrapped under their own indentation. */
const indent = EditorView.decorations.compute(["doc"], ({ doc }) => {
  const lines = [];
  for (let n = 1; n <= doc.lines; n++) {
    const { from, text } = doc.line(n);
    const attributes = { style: `--indent: ${text.match(/^ */)[0].length + 2}ch` };
    lines.push(Decoration.line({ attributes }).range(from));
  }
  return Decoration.set(lines);
});

const extensions = [
  python(),
  syntaxHighlighting(classHighlighter),
  lineNumbers(),
  EditorView.lineWrapping,
  EditorView.editable.of(false),
  EditorState.readOnly.of(true),
  EditorState.phrases.of({ "$ unchanged lines": "$ equal lines" }),
  indent,
  here.of([]),
];

function draw(a, b) {
  const [docA, docB] = [a, b].map((name) => SCRIPTS[name].source.replace(/\n$/, ""));
  const options = {
    collapseUnchanged: open ? undefined : { margin: 2, minSize: 4 },
    diffConfig: { hunks: HUNKS[`${a}..${b}`] },
    // A fragment of a docstring would be coloured as code.
    syntaxHighlightDeletions: false,
    mergeControls: false,
  };
  merge?.destroy();
  if (narrow.matches) {
    const unified = unifiedMergeView({ original: docA, ...options });
    merge = new EditorView({ parent: $("diff"), doc: docB, extensions: [extensions, unified] });
    views = [merge];
  } else {
    const sides = { a: { doc: docA, extensions }, b: { doc: docB, extensions } };
    merge = new MergeView({ parent: $("diff"), ...sides, ...options });
    views = [merge.a, merge.b];
  }
  const drawn = views;
  setTimeout(() => drawn.forEach((view) => forceParsing(view, view.state.doc.length, 2000))); // colours
  at = -1;
  label();
}

const chunks = () => getChunks(views.at(-1).state).chunks;

function label() {
  const all = chunks().length;
  $("at").textContent = at >= 0 ? `${at + 1} of ${all}` : all == 1 ? "1 change" : `${all} changes`;
}

/** Mark the lines of a change on one side, "A" or "B"; where it has none there, the line behind the gap. */
function mark(view, chunk, side) {
  const [from, to, end] = [chunk[`from${side}`], chunk[`to${side}`], chunk[`end${side}`]];
  const { doc } = view.state;
  const lines = [];
  for (let pos = from; pos < to; pos = doc.lineAt(Math.min(pos, end)).to + 1)
    lines.push(Decoration.line({ class: "here" }).range(pos));
  const behind = doc.lineAt(Math.min(from, doc.length)).from;
  if (from == to) lines.push(Decoration.line({ class: "here gap" }).range(behind));
  view.dispatch({ effects: here.reconfigure(EditorView.decorations.of(Decoration.set(lines))) });
}

/** Scroll by a distance. What comes into sight gets its true height only then, hence more than once. */
function settle(distance, times = 4) {
  scrollBy(0, distance());
  if (times) requestAnimationFrame(() => settle(distance, times - 1));
}

/** Go to the next change (1) or the one before (-1), from the last one or from where one has scrolled to. */
function move(step) {
  const [all, view] = [chunks(), views.at(-1)];
  if (!all.length) return;
  const margin = $("moves").getBoundingClientRect().bottom + 70;
  const position = (i) => Math.min(all[i].fromB, view.state.doc.length);
  const y = (i) => view.documentTop + view.lineBlockAt(position(i)).top;
  if (at >= 0 && y(at) >= 0 && y(at) < innerHeight) at += step;
  else {
    const below = all.findIndex((_, i) => y(i) > margin);
    at = (below < 0 ? all.length : below) - (step < 0);
  }
  at = (at + all.length) % all.length;
  views.forEach((v, i) => mark(v, all[at], i == views.length - 1 ? "B" : "A"));
  settle(() => y(at) - margin);
  label();
}

/** What the address says: two scripts, or else all pairs. */
function show() {
  const wanted = location.hash.slice(1);
  const known = Object.hasOwn(HUNKS, wanted);
  const [a, b] = known ? wanted.split("..") : ["", ""];
  document.body.classList.toggle("two", known);
  document.title = known ? wanted : "Compare two scripts";
  $("pairs").hidden = known;
  $("comparison").hidden = !known;
  $("unknown").textContent = known || !wanted ? "" : `There are no two scripts "${wanted}".`;
  $("a").value = a;
  $("b").value = b;
  if (!known) {
    if (wanted) history.replaceState(null, "", "#"); // the theme's script fails where an escape is broken
    return;
  }
  const lines = HUNKS[wanted].reduce((sum, [a0, a1, b0, b1]) => sum + a1 - a0 + b1 - b0, 0);
  $("count").textContent = `${lines} lines differ`;
  $("formulas-a").innerHTML = summary(a);
  $("formulas-b").innerHTML = summary(b);
  draw(a, b);
  scrollTo(0, 0);
}

function summary(name) {
  const { title, link, equations } = SCRIPTS[name];
  return `<h2><a href="${link}">${name}.py</a></h2><p>${title}</p>${equations}`;
}

const chosen = () => [$("a").value, $("b").value];
const choose = (a, b) => a && b && (location.hash = `${a}..${b}`);
const next = () => move(1);
const previous = () => move(-1);
const fold = () => {
  open = !open;
  $("fold").firstChild.textContent = open ? "changes only" : "all lines";
  draw(...chosen());
};
const keys = { n: next, j: next, p: previous, k: previous, o: fold };

$("a").onchange = $("b").onchange = () => choose(...chosen());
$("swap").onclick = () => choose(...chosen().reverse());
$("next").onclick = next;
$("previous").onclick = previous;
$("fold").onclick = fold;
narrow.onchange = () => $("comparison").hidden || draw(...chosen());
addEventListener("hashchange", show);
function press(event) {
  const typing = event.target.closest?.("input, select, textarea");
  if (typing || event.ctrlKey || event.metaKey || event.altKey) return;
  if ($("comparison").hidden || !Object.hasOwn(keys, event.key)) return;
  event.stopImmediatePropagation(); // the theme turns pages with n and p
  event.preventDefault();
  keys[event.key]();
}
addEventListener("keydown", press, true);
show();
