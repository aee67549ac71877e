// The answer: the best method, its difference from the baseline with a test, client scores, cost.

const WORDS = { better: "▲", worse: "▼", equivalent: "=", unclear: "?" };
const CLIENT_METRIC = /^(mean_client|worst_tenth|at_zero)_/;
const CLIENTS = { mean: "mean client", worst: "worst tenth", zero: "at zero" };

// The mean of the tests in the last tenth of the rounds up to round `until`, or to the end.
function scoreOf(run, name, until) {
  const group = page.data.groups[run.group];
  if (until === null) return group.figures[name][group.seeds.indexOf(run.seed)];
  const { x, y } = curveOf(run, name);
  const end = x.findLastIndex((round) => round <= until);
  const width = smoothingWidth(page.data.window, run.planned);
  return mean(y.filter((_, index) => index <= end && x[index] > x[end] - width));
}

// As `summary.paired`: enough finished pairs, or all of them at the last round that all have.
function pairsOf(group, base, name) {
  const theirs = new Map(page.runsOf.get(base.index).map((run) => [run.seed, run]));
  let pairs = page.runsOf.get(group.index).filter((run) => theirs.has(run.seed)).map((run) => [run, theirs.get(run.seed)]).filter((pair) => pair.every((run) => run.curves[name]));
  const finished = pairs.filter((pair) => pair.every((run) => run.rounds >= run.planned));
  let until = null;
  if (finished.length >= Math.min(pairs.length, page.data.fewest)) pairs = finished;
  else until = Math.min(...pairs.flat().map((run) => curveOf(run, name).x.at(-1)));
  return { until, values: new Map(pairs.map(([ours, other]) => [ours.seed, scoreOf(ours, name, until) - scoreOf(other, name, until)])) };
}

// The probability that Student's t lies between −t and t, as `statistics.t_within`.
function tWithin(t, freedom) {
  const angle = Math.atan2(t, Math.sqrt(freedom));
  const odd = freedom % 2;
  let [term, total] = [odd ? Math.cos(angle) : 1, 0];
  for (let step = 0; step < Math.floor(freedom / 2); step++) {
    total += term;
    const upper = 2 * step + (odd ? 2 : 1);
    term *= Math.cos(angle) ** 2 * upper / (upper + 1);
  }
  return Math.min(1, odd ? 2 / Math.PI * (angle + Math.sin(angle) * total) : Math.sin(angle) * total);
}

function differenceOf({ values, until }) {
  const found = [...values.values()];
  if (!found.length) return null;
  const middle = mean(found);
  const error = found.length > 1 ? sampleDeviation(found) / Math.sqrt(found.length) : null;
  const half = error === null ? null : page.data.quantiles[found.length - 1] * error;
  const p = found.length < page.data.fewest ? null : error ? 1 - tWithin(Math.abs(middle) / error, found.length - 1) : Number(middle === 0);
  return { pairs: found.length, until, mean: middle, low: half === null ? null : middle - half, high: half === null ? null : middle + half, p };
}

// A word for each difference shown, by p-values corrected for their number (Holm), as `statistics.judge`.
function judge(found, { lower, margin }) {
  const tested = found.filter((one) => one.p !== null).sort((one, other) => one.p - other.p);
  let largest = 0;
  tested.forEach((one, rank) => { one.corrected = largest = Math.max(largest, Math.min(1, (tested.length - rank) * one.p)); });
  for (const one of found) {
    one.of = tested.length;
    if (one.p === null) one.word = "unclear";
    else if (one.corrected < 1 - page.data.sure) one.word = (one.mean < 0) === lower ? "better" : "worse";
    else one.word = margin !== null && Math.max(-one.low, one.high) <= margin ? "equivalent" : "unclear";
  }
}

// Rankings: one block per condition, and before them their mean where there are several.
function blocksOf() {
  const blocks = [];
  for (const family of new Set(page.conditions.map((condition) => condition.family))) {
    const conditions = page.conditions.filter((condition) => condition.family === family && condition.groups.some((group) => figureOf([group], page.metric.name)));
    const single = conditions.map((condition) => ({
      title: titleOf(condition), family, base: baseIn(family), rows: condition.groups.filter((group) => group.figures[page.metric.name]).map((group) => {
        const base = page.data.groups.findIndex((one) => one.method === baseIn(family) && one.conditions.includes(condition.index));
        const pairs = base >= 0 && group.method !== baseIn(family) && group.conditions.length === 1 ? pairsOf(group, { index: base }, page.metric.name) : null;
        return { method: group.method, groups: [group], pairs, found: pairs && differenceOf(pairs) };
      }),
    }));
    if (single.length > 1) blocks.push(...overall(family, single));
    blocks.push(...single);
  }
  // Two families of tests: the means over conditions, and the conditions themselves.
  for (const kind of [true, false]) judge(blocks.filter((block) => Boolean(block.overall) === kind).flatMap((block) => block.rows.map((row) => row.found).filter(Boolean)), page.metric);
  for (const block of blocks) block.rows = ranked(block.rows, block.base);
  return blocks;
}

// Conditions of one seed are no repetitions: their differences are averaged seed by seed.
function overall(family, single) {
  const base = baseIn(family);
  const under = single.filter((block) => block.rows.some((row) => row.method === base));
  if (under.length < 2) return [];
  const rows = under[0].rows.map(({ method }) => under.map((block) => block.rows.find((row) => row.method === method))).filter((found) => found.every(Boolean)).map((found) => {
    const lists = found.map((row) => row.pairs).filter(Boolean);
    const seeds = lists.length === found.length ? [...lists[0].values.keys()].filter((seed) => lists.every(({ values }) => values.has(seed))) : [];
    const ends = lists.map(({ until }) => until).filter((until) => until !== null);
    return {
      method: found[0].method, groups: found.flatMap((row) => row.groups),
      found: differenceOf({ values: new Map(seeds.map((seed) => [seed, mean(lists.map(({ values }) => values.get(seed)))])), until: ends.length ? Math.min(...ends) : null }),
    };
  });
  return rows.length > 1 ? [{ title: `${page.several.families ? `${family}: ` : ""}mean over ${under.length} conditions`, family, base, overall: true, rows }] : [];
}

// The mean over seeds of the mean over conditions.
function figureOf(groups, name) {
  const lists = groups.map((group) => group.figures[name]);
  if (lists.some((values) => !values || values.includes(null))) return null;
  const seeds = groups[0].seeds.filter((seed) => groups.every((group) => group.seeds.includes(seed)));
  const values = seeds.map((seed) => mean(groups.map((group, index) => lists[index][group.seeds.indexOf(seed)])));
  return values.length ? { mean: mean(values), deviation: sampleDeviation(values) } : null;
}

function fairnessOf(groups, name) {
  return groups.every((group) => group.fairness) ? mean(groups.map((group) => group.fairness[name])) : null;
}

function answerColumns(all) {
  const { data, metric } = page;
  const of = (key, unit, label) => ({ key, label: label + (unit.percent ? " %" : ""), lower: unit.lower, factor: unit.percent ? 100 : 1, value: ({ groups }) => figureOf(groups, key)?.mean ?? null, text: ({ groups }) => withDeviation(unit, figureOf(groups, key)) });
  const simple = (key, label, value, text) => ({ key, label, value, text: (row) => (value(row) === null ? "–" : text(value(row))), lower: true, factor: 1 });
  const fair = (name) => ({ ...simple(name, `${CLIENTS[name]} %`, ({ groups }) => fairnessOf(groups, name), (value) => (100 * value).toFixed(1)), lower: name === "zero", factor: 100 });
  const cost = (label, ...names) => simple(label, label, ({ groups }) => megabytesOf(groups, ...names), megabytes);
  const found = (key, label, value, text) => ({ ...simple(key, label, (row) => value(row.found) ?? null, text), lower: false });
  const some = (test) => page.shown.some(test);
  const points = metric.percent ? 100 : 1;
  const columns = [
    { key: "title", label: "method", value: ({ method }) => data.methods[method].title, text: null, lower: true, factor: 1 },
    of(metric.name, metric, metric.label),
    { ...found("difference", "difference", (one) => one?.mean, null), factor: points, text: (row) => intervalCell(row) },
    { ...found("p", "p (Holm)", (one) => one?.corrected, (value) => (value < 0.001 ? "< 0.001" : value.toFixed(3))), lower: true },
    ...(some((group) => group.fairness) ? Object.keys(CLIENTS).map(fair) : []),
    ...data.metrics.filter((one) => one.personal && one.name !== metric.name && some((group) => group.figures[one.name])).map((one) => of(one.name, one, one.label)),
    ...(some((group) => megabytesOf([group], "bytes up", "bytes down") > 0) ? [cost("MB", "bytes up", "bytes down")] : []),
    simple("seeds", "seeds", ({ groups }) => Math.min(...groups.map((group) => group.seeds.length)), String),
    { ...simple("rounds", "rounds", ({ groups }) => Math.min(...groups.map((group) => group.rounds)), String), text: ({ groups }) => { const [rounds, planned] = ["rounds", "planned"].map((name) => Math.min(...groups.map((group) => group[name]))); return rounds < planned ? `${rounds} of ${planned}` : String(rounds); } },
  ];
  if (data.target !== null && metric.name === data.metric) columns.splice(4, 0, { ...of("rounds to target", { lower: true, whole: true }, `rounds to ${data.target}`) });
  if (!all) return columns;
  const named = new Set(columns.map((column) => column.key));
  return [...columns, ...(metric.name === data.metric ? [of("mean over rounds", metric, "mean over rounds")] : []), cost("MB up", "bytes up"), cost("MB down", "bytes down"),
    simple("seconds", "wall clock s", ({ groups }) => figureOf(groups, "seconds")?.mean ?? null, formatNumber),
    ...data.metrics.filter((one) => !named.has(one.name) && !one.class && !CLIENT_METRIC.test(one.name)).map((one) => of(one.name, one, one.label))];
}

function megabytesOf(groups, ...names) {
  const found = names.map((name) => figureOf(groups, name));
  return found.every(Boolean) ? 1e-6 * found.reduce((sum, one) => sum + one.mean, 0) : null;
}

// By the score; while runs are unfinished by the difference at the round that they share with the baseline.
function rankOf(rows, base) {
  const unfinished = rows.some((row) => row.found && row.found.until !== null);
  return (row) => (unfinished ? (row.method === base ? 0 : row.found?.mean ?? null) : figureOf(row.groups, page.metric.name)?.mean ?? null);
}

function ranked(rows, base) {
  const [key, down] = page.state.sort.split(":");
  const column = answerColumns(true).find((one) => one.key === key) || { value: rankOf(rows, base) };
  const falling = key ? Boolean(down) : !page.metric.lower;
  return [...rows].sort((one, other) => {
    const [a, b] = [column.value(one), column.value(other)];
    if (a === null || b === null) return (a === null) - (b === null);
    return (falling ? -1 : 1) * (typeof a === "string" ? a.localeCompare(b) : a - b);
  });
}

// The difference with its interval, drawn on a scale that all rows of a block share.
function intervalCell({ found, range }) {
  if (!found) return make("span", { class: "difference" }, make("span", {}, "–"));
  const { metric } = page;
  const x = scaleOf(range, [4, 112], false);
  const svg = svgOf(116, 20, `95 % interval ${found.p === null ? "unknown" : `${signed(metric, found.low)} to ${signed(metric, found.high)}`}`, { class: "interval" });
  const color = { better: "--good", worse: "--bad" }[found.word] || "--faint";
  svg.append(lineAt(x(0), 0, x(0), 20, { stroke: variable("--ink") }));
  if (found.p !== null) svg.append(lineAt(x(found.low), 10, x(found.high), 10, { stroke: variable(color), "stroke-width": 3 }));
  svg.append(makeSvg("circle", { cx: x(found.mean), cy: 10, r: 4, fill: variable(color) }));
  const at = found.until === null ? "" : ` @ ${found.until}`;
  const word = found.p === null ? "" : ` ${WORDS[found.word]} ${found.word}`;
  return make("span", { class: "difference" }, make("span", {}, signed(metric, found.mean)), svg, make("span", { class: `word ${found.word}` }, word + at));
}

function rangeOf(rows) {
  const ends = rows.flatMap(({ found }) => (found ? [found.mean, ...(found.p !== null ? [found.low, found.high] : [])] : []));
  const [low, high] = [Math.min(0, ...ends), Math.max(0, ...ends)];
  const room = 0.05 * (high - low) || 0.01;
  return [low - room, high + room];
}

// The answer in words: best method, score, difference from the baseline with its verdict, client scores, cost.
function sentence(block) {
  const { data, metric } = page;
  const federated = block.rows.filter((row) => !row.groups[0].pooled && figureOf(row.groups, metric.name));
  const rank = rankOf(federated, block.base);
  const key = (row) => (metric.lower ? -1 : 1) * (rank(row) ?? -Infinity);
  const [best, next] = [...federated].sort((one, other) => key(other) - key(one));
  if (!best) return ["No method has been tested yet."];
  const [done, planned] = ["rounds", "planned"].map((name) => Math.min(...best.groups.map((group) => group[name])));
  const unfinished = done < planned ? ` after ${done} of ${planned} rounds` : "";
  const title = ({ method }) => data.methods[method].title;
  const base = data.methods[block.base].title;
  const beside = best.method === block.base ? next : best;
  const found = beside?.found;
  const unit = metric.percent ? " points" : "";
  const until = found && found.until !== null ? `, both at round ${found.until}` : "";
  const test = !found ? "" : found.p === null ? ` (${found.pairs === 1 ? "one seed" : `${found.pairs} seeds`}, too few for a test${until})`
    : `. Verdict: ${found.word} (${Math.round(100 * data.sure)} % interval ${signed(metric, found.low)} to ${signed(metric, found.high)}, p ${found.corrected < 0.001 ? "< 0.001" : `= ${found.corrected.toFixed(3)}`} corrected for ${found.of} comparison${found.of === 1 ? "" : "s"}${until})`;
  const [cost, usual] = [best, block.rows.find((row) => row.method === block.base)].map((row) => (row ? megabytesOf(row.groups, "bytes up", "bytes down") : null));
  const times = cost && usual && best.method !== block.base && !unfinished ? ` (${(cost / usual).toFixed(2)} × ${base})` : "";
  const [client, worst, zero] = Object.keys(CLIENTS).map((name) => fairnessOf(best.groups, name));
  const own = figureOf(best.groups, `personal_${data.metric}`);
  return [
    make("b", {}, title(best)), ` scores ${metric.lower ? "lowest" : "highest"}${unfinished ? " so far" : ""}${block.overall ? `${page.several.families ? ` on ${block.family}` : ""}, mean over ${best.groups.length} conditions` : block.title === "all runs" ? "" : ` with ${block.title}`}: ${formatAs(metric)(figureOf(best.groups, metric.name).mean)} ${metric.label}${unfinished}`,
    found ? `${beside === best ? ", " : `. Next is ${title(beside)}, `}${signed(metric, found.mean)}${unit} against ${base}${test}` : "", ".",
    client === null ? "" : ` The mean client has ${formatPercent(client)}, the worst tenth ${formatPercent(worst)}; ${formatPercent(zero)} of clients are at zero.`,
    own ? ` With personal models ${formatPercent(own.mean)}.` : "",
    cost ? ` Traffic: ${megabytes(cost)} MB${times}.` : "",
  ].filter(Boolean);
}

page.sections.push({
  id: "answer",
  title: "Answer",
  empty() {
    return page.data.metrics.length ? null : ["No round is tested yet.", null];
  },
  build(host) {
    host.append(
      make("p", { id: "sentence" }),
      make("div", { class: "controls" }, chooser("data-set", "Data set", "data"), chooser("metric", "Metric", "metric"), chooser("base", "Baseline", "base"), switcher("columns", "all columns", "columns")),
      scrolling("answer-scroll", "Methods, best first", make("table", { id: "answer-table" })), make("button", { type: "button", class: "more", id: "more-blocks", onclick: () => change({ all: !page.state.all }) }), make("p", { class: "hint" }), make("div", { id: "notices" }));
  },
  rows() {
    const columns = answerColumns(true).slice(1);
    const unit = (column) => (column.factor === 100 && !column.label.includes("%") ? `${column.label} in points` : column.label);
    return [["method", "condition", "seed", ...columns.map(unit), "low", "high", "verdict", "at_round"], ...blocksOf().flatMap((block) => block.rows.map((row) => [
      page.data.methods[row.method].title, block.title, row.groups[0].seeds.join(" "),
      ...columns.map((column) => { const value = column.value(row); return value === null ? null : column.factor * value; }),
      ...["low", "high"].map((end) => (row.found && row.found[end] !== null ? (page.metric.percent ? 100 : 1) * row.found[end] : null)), row.found?.word, row.found?.until]))];
  },
  draw(host) {
    const { data, metric, state } = page;
    const families = [...new Set(data.conditions.map((condition) => condition.family))];
    syncOptions(host.querySelector("#data-set"), [["all", "all"], ...families.map((family) => [family, family])], page.family || "all");
    host.querySelector("#data-set").parentElement.hidden = families.length < 2;
    syncOptions(host.querySelector("#metric"), data.metrics.map((one) => [one.name, one.label]), metric.name);
    syncOptions(host.querySelector("#base"), data.methods.map((method) => [method.title, method.title]), state.base || data.methods[baseIn(page.conditions[0]?.family)]?.title);
    host.querySelector("#columns").checked = state.columns;
    const blocks = blocksOf();
    // The mean over conditions answers; the conditions follow when they are asked for.
    const few = blocks.filter((block) => block.overall);
    const shown = state.all ? blocks : few.length ? few : blocks.slice(0, MOST_PANELS);
    host.querySelector("#sentence").replaceChildren(...(blocks.length ? sentence(blocks[0]) : [`No run in view has ${metric.label}.`]));
    const columns = answerColumns(state.columns);
    const table = host.querySelector("table");
    const focused = table.contains(document.activeElement) ? document.activeElement.dataset.key : null;
    const [key, down] = state.sort.split(":");
    const heads = columns.map((column) => make("th", { scope: "col", class: column.key === "difference" ? "drawn" : null, "aria-sort": key === column.key ? (down ? "descending" : "ascending") : "none" }, make("button", {
      type: "button", "data-key": column.key,
      onclick: () => change({ sort: key === column.key ? `${key}${down ? "" : ":down"}` : `${column.key}${column.lower ? "" : ":down"}` }),
    }, column.label)));
    const bodies = shown.map((block) => {
      const range = rangeOf(block.rows);
      return make("tbody", {}, blocks.length > 1 ? make("tr", { class: "block" }, make("th", { scope: "rowgroup", colspan: columns.length }, block.title)) : null,
        block.rows.map((row) => make("tr", { class: row.method === block.base ? "base" : null }, columns.map((column) => (column.key === "title"
          ? make("th", { scope: "row" }, swatch(row.method), "\u00a0", data.methods[row.method].title, row.method === block.base ? make("small", {}, " baseline") : row.groups[0].pooled ? make("small", {}, " pooled data") : null) : make("td", {}, column.text({ ...row, range })))))));
    });
    table.replaceChildren(make("thead", {}, make("tr", {}, heads)), ...bodies);
    host.querySelector("#answer-scroll").classList.toggle("tall", shown.reduce((sum, block) => sum + block.rows.length, 0) > 30);
    if (focused) [...table.querySelectorAll("button")].find((button) => button.dataset.key === focused)?.focus();
    const more = host.querySelector("#more-blocks");
    more.hidden = shown.length === blocks.length && !(few.length || blocks.length > MOST_PANELS);
    more.textContent = state.all ? "Show fewer rankings" : `Show all ${blocks.length} rankings`;
    host.querySelector("#notices").replaceChildren(...data.notices.filter(([family]) => !page.family || family === page.family).map(([, text]) => make("p", { class: "problem" }, text)),
      data.repeated.length ? make("details", {}, make("summary", {}, `${data.repeated.length} seeds are stored more than once; the longest run of each is shown`), make("ul", { class: "absent" }, data.repeated.map((text) => make("li", {}, text)))) : "");
    const bases = [...new Set(blocks.map((block) => data.methods[block.base].title))].join(" or ");
    const tests = [...new Set(shown.flatMap((block) => block.rows.map((row) => row.found?.of)).filter(Boolean))].join(" and ");
    host.querySelector(".hint").textContent = [
      `${metric.label}: mean over the last ${Math.round(100 * data.window)} % of the rounds${page.several.seeds ? " ± sample standard deviation over seeds" : ""}.`,
      `Baseline: ${bases}${state.base ? "" : /^fedavg$/i.test(bases) ? "" : ", as the method with most pairs"}.`,
      tests ? `Difference${metric.percent ? " in points" : ""} on the same seeds with ${Math.round(100 * data.sure)} % interval (Student's t); p corrected for ${tests} comparisons (Holm). Better or worse: p < 0.05; equivalent: interval within ${metric.margin === null ? "a margin (none for this metric)" : `± ${formatNumber((metric.percent ? 100 : 1) * metric.margin)}${metric.percent ? (metric.margin === 0.01 ? " point" : " points") : ""}`}; else unclear.` : `No test: fewer than ${data.fewest} seeds in common.`,
      blocks.some((block) => block.rows.some((row) => row.found && row.found.until !== null)) ? "@ n: some runs are unfinished; compared and ranked at round n, the last one that all have." : "",
      few.length ? "A mean over conditions ranks the methods that were run in all of them." : "",
      page.shown.some((group) => group.fairness) ? "Mean client, worst tenth, at zero: scores on each client's own test samples." : "",
    ].filter(Boolean).join(" ");
  },
});
