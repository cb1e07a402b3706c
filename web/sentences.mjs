// One sentence or two about a script, computed from its numbers, for the page Playground.
import { batchOf } from "./estimators.mjs";

/** What the sentences can be about. */
export const QUESTIONS = {
  length: "long and short responses",
  responses: "the response with most push",
  prompts: "the two prompts",
  scale: "the scale of the rewards",
  ratios: "log-ratios and the clip",
};

const sum = (xs) => xs.reduce((total, x) => total + x, 0);
const mean = (xs) => sum(xs) / xs.length;
const near = (x, y) => Math.abs(x - y) <= 0.005 * Math.max(Math.abs(x), Math.abs(y)) + 1e-9;
const isZero = (x) => Math.abs(x) < 1e-9;
const digits = (x, n) => (isZero(x) ? "0" : String(Number(x.toPrecision(n))).replace("-", "−"));
const round = (x) => digits(x, 2);
const reward = (x) => `reward ${digits(x, 4)}`;
const list = (names) => names.join(", ").replace(/, ([^,]*)$/, " and $1");
const direction = (x) => (x > 0 ? "up" : "down");

/** "1/3 of the push of", "the same push as" or "2.4 times the push of". */
function share(x) {
  if (near(x, 1)) return "the same push as";
  if (x < 1 && near(1 / x, Math.round(1 / x))) return `1/${Math.round(1 / x)} of the push of`;
  return `${digits(x, Math.abs(x - 1) < 0.05 ? 3 : 2)} times the push of`;
}

/** Where the clip stops a token that has an advantage, rounding errors aside. */
export const stopped = (advantages, clipped) => clipped.map((x, t) => x && !isZero(advantages[t]));

/** What the sentences need to know of each response. */
function describe(estimate, group) {
  const batch = batchOf(group);
  const { advantages, weights, clipped, stops } = estimate(batch);
  return batch.responses.map(({ reward, logRatios }, i) => {
    const prompt = Math.floor(i / batch.k);
    const difference = reward - mean(group.prompts[prompt].responses.map((other) => other.reward));
    return {
      name: nameOf(i, batch.k),
      prompt,
      reward,
      length: logRatios.length,
      rank: isZero(difference) ? 0 : Math.sign(difference), // 1: right, -1: wrong
      moved: logRatios.map((x) => x != 0),
      stops,
      clipped: stopped(advantages[i], clipped[i]),
      weights: weights[i],
      total: sum(weights[i]),
      size: sum(weights[i].map(Math.abs)),
    };
  });
}

export const nameOf = (i, k) => "AB"[Math.floor(i / k)] + ((i % k) + 1);

const withRewards = (group, f) => ({
  ...group,
  prompts: group.prompts.map(({ greedy, responses }) => ({
    greedy: f(greedy),
    responses: responses.map((response) => ({ ...response, reward: f(response.reward) })),
  })),
});

const withoutRatios = (group) => ({
  ...group,
  prompts: group.prompts.map((prompt) => ({
    ...prompt,
    responses: prompt.responses.map(({ reward, logRatios }) => ({ reward, logRatios: logRatios.map(() => 0) })),
  })),
});

const allWeights = (responses) => responses.flatMap((response) => response.weights);
const sameWeights = (one, other) => allWeights(one).every((x, n) => near(x, allWeights(other)[n]));

/** The responses to the same prompt that have a lower reward. */
const below = (response, responses) =>
  responses.filter((x) => x.prompt == response.prompt && x.reward < response.reward - 1e-9);

/** A response that is pushed down although it is right, or better than half of the responses to its prompt. */
function isMisjudged(response, responses) {
  const group = responses.filter((x) => x.prompt == response.prompt);
  return response.total < -1e-9 && (response.rank > 0 || below(response, responses).length >= group.length / 2);
}

/** The two responses to a prompt with equal rewards whose lengths differ most, above (1) or below (-1) the mean. */
function longAndShort(responses, rank) {
  const pairs = responses
    .filter((response) => response.rank == rank)
    .flatMap((long, _, some) => some.map((short) => ({ long, short, times: long.length / short.length })))
    .filter(({ long, short }) => long.prompt == short.prompt && near(long.reward, short.reward));
  const best = pairs.sort((one, other) => other.times - one.times)[0];
  if (!best || best.times == 1) return null;
  const [long, short] = [best.long.total / best.long.length, best.short.total / best.short.length];
  return { ...best, kind: rank > 0 ? "right" : "wrong", perToken: [long, short], share: long / short };
}

function aboutOnePair({ long, short, kind, perToken, share: q }) {
  const [one, other] = [`the long ${kind} ${long.name}`, `the short ${kind} ${short.name}`];
  const two = `Of the two ${kind} responses ${long.name} and ${short.name}, only`;
  if (perToken.every(isZero)) return `Neither ${one} nor ${other} is pushed.`;
  if (isZero(perToken[0])) return `${two} the short one is pushed.`;
  if (isZero(perToken[1])) return `${two} the long one is pushed.`;
  if (q < 0) {
    const [x, y] = perToken.map(direction);
    return `On average, a token of ${one} is pushed ${x}, a token of ${other} ${y}.`;
  }
  return `A token of ${one} gets ${share(q)} a token of ${other}.`;
}

function aboutLength(responses) {
  const pairs = [longAndShort(responses, 1), longAndShort(responses, -1)].filter((pair) => pair);
  if (!pairs.length) return "No two right or two wrong responses to a prompt differ in length only: change a length.";
  const [right, wrong] = pairs;
  const isAsMeant = pairs.every(({ kind, perToken }) => {
    const sign = kind == "right" ? 1 : -1;
    return perToken.every((x) => sign * x > 1e-9);
  });
  const whole = pairs.map(({ long, short }) => long.total / short.total);
  if (pairs.length < 2 || !isAsMeant || !near(right.share, wrong.share) || !near(...whole))
    return pairs.map(aboutOnePair).join(" ");
  const names = pairs.map(({ long, short, kind }) => `${kind} (${long.name}, ${short.name})`).join(" or ");
  const tokens = `a token of a short one, ${names}`;
  if (near(right.share, 1)) {
    const total = near(whole[0], 1) ? "the same" : `${round(whole[0])} times as much`;
    return `A token of a long response gets the same push as ${tokens}. The long response as a whole gets ${total}.`;
  }
  const text = near(whole[0], 1)
    ? `In total, a long response gets the same push as a short one, so each token gets ${share(right.share)} ${tokens}`
    : `A token of a long response gets ${share(right.share)} ${tokens}`;
  if (right.share > 1) return `${text}.`;
  return `${text}. A short right answer gains most per token, a long wrong one loses least.`;
}

function aboutResponses(responses) {
  const top = responses.reduce((best, x) => (x.size > best.size + 1e-9 ? x : best));
  const same = responses.filter((x) => x != top && near(x.size, top.size));
  const percent = Math.round((100 * top.size) / sum(responses.map((x) => x.size)));
  const own = responses.filter((x) => x.prompt == top.prompt && x != top);
  const last = own.reduce((worst, x) => (x.reward < worst.reward ? x : worst));
  const misjudged = own.filter((x) => isMisjudged(x, responses));
  const parts = [`${top.name} (${reward(top.reward)}) has ${percent} % of all push`];
  if (same.length) parts[0] += same.length == 1 ? `, as ${same[0].name} has` : `, as ${same.length} others have`;
  if (isZero(last.size)) parts.push(`${last.name} (${reward(last.reward)}) is not pushed`);
  else if (top.total * last.total < 0) {
    const factor = Math.abs(top.total / last.total);
    const hard = near(factor, 1) ? "as hard as" : `${round(factor)} times as hard as`;
    const [x, y] = [top, last].map(({ total }) => direction(total));
    parts.push(`it is pushed ${x} ${hard} ${last.name} (${reward(last.reward)}) is pushed ${y}`);
  }
  const text = `${parts.join("; ")}.`;
  if (!misjudged.length) return text;
  const verb = misjudged.length > 1 ? "are" : "is";
  const count = Math.min(...misjudged.map((x) => below(x, responses).length));
  const names = list(misjudged.map((x) => x.name));
  return `${text} ${names} ${verb} pushed down, although ${count} of ${own.length + 1} responses have a lower reward.`;
}

function aboutPrompts(responses) {
  const prompts = [0, 1].map((p) => {
    const own = responses.filter((x) => x.prompt == p);
    const pushed = own.filter((x) => !isZero(x.size));
    return {
      name: "AB"[p],
      size: sum(own.map((x) => x.size)),
      average: mean(own.map((x) => x.reward)),
      isEqual: own.every((x) => x.reward == own[0].reward),
      pushed,
    };
  });
  const parts = prompts
    .filter(({ isEqual, pushed }) => isEqual && pushed.length)
    .map(({ name, pushed }) => {
      const way = direction(pushed[0].total);
      if (pushed.length == 1) return `${pushed[0].name} is pushed ${way}`;
      const isOneWay = pushed.length == responses.length / 2 && pushed.every((x) => direction(x.total) == way);
      return isOneWay ? `all of prompt ${name} is pushed ${way}` : `some of prompt ${name} is pushed`;
    });
  if (parts.length) return `The rewards to a prompt are equal, and yet ${list(parts)}.`;
  const [easy, hard] = prompts[0].average >= prompts[1].average ? prompts : [...prompts].reverse();
  if (isZero(easy.size) || isZero(hard.size))
    return `Only prompt ${isZero(easy.size) ? hard.name : easy.name} is pushed.`;
  if (near(easy.average, hard.average)) return `Prompt A gets ${share(prompts[0].size / prompts[1].size)} prompt B.`;
  const average = (prompt) => `(mean reward ${round(prompt.average)})`;
  const comparison = share(hard.size / easy.size);
  const harder = `The hard prompt ${hard.name} ${average(hard)}`;
  return `${harder} gets ${comparison} the easy prompt ${easy.name} ${average(easy)}.`;
}

function aboutScale(responses, estimate, group) {
  const values = [...new Set(responses.map((x) => x.reward))].sort((x, y) => x - y);
  const isBinary = values.length == 2;
  const [low, high] = values[0] == -1 && values[1] == 1 ? [0, 1] : [-1, 1];
  const other = (x) => (isBinary ? low + ((x - values[0]) * (high - low)) / (values[1] - values[0]) : 2 * x);
  const changed = describe(estimate, withRewards(group, other));
  const premise = isBinary ? `With rewards ${low} and ${high}`.replace("-", "−") : "With all rewards doubled";
  const factors = allWeights(changed).flatMap((x, n) => {
    const now = allWeights(responses)[n];
    return isZero(x) && isZero(now) ? [] : [x / now];
  });
  const wrong = responses.filter((x) => isMisjudged(x, responses)).map((x) => x.name);
  const verb = wrong.length > 1 ? "are" : "is";
  const alert = isBinary && wrong.length ? `${list(wrong)} ${verb} pushed down, although right. ` : "";
  const start = `${alert}${premise},`;
  if (!factors.every((x) => near(x, factors[0]))) return `${start} the pushes would differ in more than scale.`;
  if (near(factors[0], 1)) return `${start} every push would be the same.`;
  const turned = factors[0] < 0 ? " in the other direction" : "";
  return `${start} every push would be ${round(Math.abs(factors[0]))} times as large${turned}.`;
}

function aboutRatios(responses, estimate, group) {
  if (group.prompts.every((prompt) => prompt.responses.every((x) => x.logRatios.every((y) => y == 0))))
    return "All log-ratios are 0, so the ratio of each token is 1: move a slider.";
  const before = describe(estimate, withoutRatios(group));
  if (sameWeights(before, responses)) return "The log-ratios change nothing.";
  const { stops } = responses[0];
  const factors = responses.flatMap(({ weights, clipped, moved }, i) => {
    const old = before[i].weights;
    return weights.map((x, t) => x / old[t]).filter((_, t) => !clipped[t] && !isZero(old[t]) && (stops || moved[t]));
  });
  const [low, high] = [Math.min(...factors), Math.max(...factors)];
  const range = near(low, high) ? round(low) : `${round(low)} to ${round(high)}`;
  if (!stops) return `No push is cut to zero; moved tokens are only scaled, by a factor of ${range}.`;
  const all = responses.flatMap((x) => (stops == "token" ? x.clipped : x.clipped.includes(true)));
  const count = all.filter((x) => x).length;
  const units = stops == "token" ? "tokens" : "responses, each as a whole";
  const why = `: the policy has already moved ${count > 1 ? "them" : "it"} far enough in the wanted direction`;
  const text = `The clip stops ${count || "none"} of the ${all.length} ${units}${count ? why : ""}.`;
  if (!factors.length) return text;
  return `${text} ${count ? "The others get" : "They get"} ${range} times the push that they would get at ratio 1.`;
}

/** How the pushes of a script relate to those of another one, where they agree up to a factor; else nothing. */
export function comparison(weights, others, other) {
  const [mine, theirs] = [weights.flat(), others.flat()];
  const n = theirs.findIndex((x) => !isZero(x));
  const factor = mine[n] / theirs[n];
  if (n < 0 || isZero(mine[n]) || !mine.every((x, t) => near(x, factor * theirs[t]))) return "";
  if (near(factor, 1)) return `Same pushes as ${other}.`;
  const size = Math.abs(factor);
  const inverse = Math.round(1 / size);
  const times = inverse > 1 && near(1 / size, inverse) ? `1/${inverse}` : `${digits(size, 3)} times`;
  return `Same pattern as ${other}, ${times} as large${factor < 0 ? " in the other direction" : ""}.`;
}

/** What the numbers of a script (a function of estimators.mjs) say about a group. */
export function sentence(ask, estimate, group) {
  const responses = describe(estimate, group);
  if (responses.every((x) => isZero(x.size))) {
    const isStopped = responses.some((x) => x.clipped.includes(true));
    return isStopped ? "No token is pushed: the clip stops them." : "No token is pushed: all advantages are 0.";
  }
  let n = 0;
  const otherRewards = [() => (7 * n++) % 5, (x) => 1 - x];
  if (ask != "ratios" && otherRewards.every((f) => sameWeights(describe(estimate, withRewards(group, f)), responses))) {
    const weights = allWeights(responses);
    const what = weights.every((x) => near(x, weights[0])) ? " Every token gets the same push." : "";
    return `The rewards change nothing.${what}`;
  }
  const about = { length: aboutLength, responses: aboutResponses, prompts: aboutPrompts, scale: aboutScale };
  return ({ ...about, ratios: aboutRatios }[ask])(responses, estimate, group);
}
