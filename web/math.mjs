// stdin: a JSON list of [TeX, display]; stdout: the list of their HTML. Wrong TeX is an error.
import katex from "katex";
import { readFileSync } from "node:fs";

const formulas = JSON.parse(readFileSync(0, "utf8"));
const render = ([tex, displayMode]) => katex.renderToString(tex, { displayMode, strict: "error" });
process.stdout.write(JSON.stringify(formulas.map(render)));
