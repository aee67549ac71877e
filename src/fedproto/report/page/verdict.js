// Which method is better, by how much, and is it more than chance? Paired differences over seeds.

const WORDS = { better: "▲", worse: "▼", level: "=", "too few seeds": "?" };

function scoresOf(group, name) {
  const found = new Map();
  (group.figures[name] || []).forEach((value, index) => { if (value !== null) found.set(group.seeds[index], value); });
  return found;
}

function differencesOf(ours, theirs) {
  return [...ours].filter(([seed]) => theirs.has(seed)).map(([seed, value]) => value - theirs.get(seed));
}

// As `fedproto.report.evidence`: Student's t over pairs; the quantiles come with the data.
function judge(differences, lower) {
  const pairs = differences.length;
  if (!pairs) return null;
  const middle = mean(differences);
  const half = pairs > 1 ? page.data.quantiles[pairs - 1] * sampleDeviation(differences) / Math.sqrt(pairs) : null;
  const found = { pairs, mean: middle, low: half === null ? null : middle - half, high: half === null ? null : middle + half };
  if (pairs < page.data.fewest) found.word = "too few seeds";
  else if (found.low <= 0 && found.high >= 0) found.word = "level";
  else found.word = (middle < 0) === lower ? "better" : "worse";
  return found;
}

function baseUnder(index) {
  return page.data.groups.find((group) => group.method === page.base && group.conditions.includes(index));
}

function verdictOf(group, index) {
  const base = baseUnder(index);
  if (!base || group.method === page.base) return null;
  return judge(differencesOf(scoresOf(group, page.metric.name), scoresOf(base, page.metric.name)), page.metric.lower);
}

// Over all conditions of a data set that both were run under: per seed the mean of the differences.
function overallOf(method, conditions) {
  const lists = [];
  for (const condition of conditions) {
    const group = condition.groups.find((one) => one.method === method);
    const base = baseUnder(condition.index);
    if (!group || !base) continue;
    const [ours, theirs] = [scoresOf(group, page.metric.name), scoresOf(base, page.metric.name)];
    lists.push(new Map([...ours].filter(([seed]) => theirs.has(seed)).map(([seed, value]) => [seed, value - theirs.get(seed)])));
  }
  if (lists.length < 2) return null;
  const seeds = [...lists[0].keys()].filter((seed) => lists.every((list) => list.has(seed)));
  const found = judge(seeds.map((seed) => mean(lists.map((list) => list.get(seed)))), page.metric.lower);
  return found && { ...found, conditions: lists.length };
}

function verdictRows() {
  const rows = [];
  const families = [...new Set(page.conditions.map((condition) => condition.family))];
  for (const family of families) {
    const conditions = page.conditions.filter((condition) => condition.family === family);
    const overall = page.methods.filter((method) => method !== page.base)
      .map((method) => ({ method, found: overallOf(method, conditions) })).filter(({ found }) => found);
    if (overall.length) rows.push({ title: `${page.several.families ? `${family}: ` : ""}mean over conditions`, overall: true, entries: overall });
    for (const condition of conditions) {
      const entries = condition.groups.map((group) => ({ method: group.method, found: verdictOf(group, condition.index) })).filter(({ found }) => found);
      if (entries.length) rows.push({ title: titleOf(condition), entries });
    }
  }
  return rows;
}

function forest(panel, width, range) {
  const { metric } = page;
  // Where it is narrow, names stand above their intervals, so that none is cut.
  const stacked = width < 400;
  const row = stacked ? 42 : 26;
  const height = panel.entries.length * row + 44;
  const left = stacked ? 6 : Math.min(width * 0.5, 16 + 6.6 * Math.max(...panel.entries.map(({ method }) => page.data.methods[method].title.length)));
  const right = width - 148;
  const x = scaleOf(range, [left + 8, right - 8], false);
  const svg = svgOf(width, height, `Differences from ${page.data.methods[page.base].title}, ${panel.title}: ` + panel.entries.map(({ method, found }) => `${page.data.methods[method].title} ${signed(metric, found.mean)} ${found.word}`).join("; "), { class: "forest" });
  for (const mark of marks(...range, Math.max(2, Math.floor((right - left) / 60)))) {
    svg.append(lineAt(x(mark), 0, x(mark), height - 40), textAt(x(mark), height - 26, formatNumber(metric.percent ? 100 * mark : mark), { "text-anchor": "middle" }));
  }
  svg.append(lineAt(x(0), 0, x(0), height - 40, { stroke: variable("--ink"), "stroke-width": 1.5 }),
    textAt((left + right) / 2, height - 8, `${metric.label}, difference${metric.percent ? " in points" : ""}`, { "text-anchor": "middle" }));
  panel.entries.forEach(({ method, found }, index) => {
    const y = (index + (stacked ? 0.7 : 0.5)) * row;
    const color = colorOf(method);
    const { title } = page.data.methods[method];
    svg.append(stacked ? textAt(left, y - 14, shortened(title, Math.floor(width / 7)), { fill: variable("--ink") })
      : textAt(left - 4, y + 4, shortened(title, Math.floor((left - 10) / 6.3)), { "text-anchor": "end", fill: variable("--ink") }));
    if (found.low !== null) svg.append(lineAt(Math.max(left, x(found.low)), y, Math.min(right, x(found.high)), y, { stroke: color, "stroke-width": 3, "stroke-opacity": found.word === "too few seeds" ? 0.35 : 0.8 }));
    if (x(found.mean) >= left && x(found.mean) <= right) svg.append(markOf(method, x(found.mean), y));
    svg.append(textAt(right + 6, y + 4, `${signed(metric, found.mean)} `, { fill: variable("--ink") },),
      textAt(width - 4, y + 4, found.word, { "text-anchor": "end", fill: variable("--ink"), "font-weight": ["better", "worse"].includes(found.word) ? 700 : null }));
  });
  return svg;
}

// A common scale per data set would hide small differences beside broken runs: each panel has its own.
function forestRange({ entries }) {
  const ends = entries.flatMap(({ found }) => [found.mean, ...(found.pairs >= page.data.fewest ? [found.low, found.high] : [])]);
  const [low, high] = [Math.min(0, ...ends), Math.max(0, ...ends)];
  const room = 0.08 * (high - low) || 0.01;
  return [low - room, high + room];
}

function sentences(rows) {
  const single = rows.filter((row) => !row.overall);
  return page.methods.filter((method) => method !== page.base).map((method) => {
    const words = single.flatMap((row) => row.entries.filter((entry) => entry.method === method).map(({ found }) => found.word));
    const counts = Object.keys(WORDS).map((word) => [word, words.filter((one) => one === word).length]).filter(([, count]) => count);
    return words.length ? { method, words, text: words.length === 1 ? words[0] : counts.map(([word, count]) => `${word} in ${count}`).join(", ") } : null;
  }).filter(Boolean);
}

page.sections.push({
  id: "verdict",
  title: "Verdict",
  empty() {
    return page.data.metrics.length && page.data.methods.length > 1 ? null : ["A verdict needs two methods that were run and tested.", null];
  },
  build(host) {
    host.append(
      make("div", { class: "controls" }, chooser("metric", "Compare by", "metric"), chooser("base", "against", "base")),
      make("ul", { class: "verdicts", id: "verdicts" }),
      make("p", { class: "missing" }), make("div", { id: "verdict-panels" }), make("p", { class: "hint" }),
      make("details", {}, make("summary", {}, "The same as a table"), scrolling("verdict-table", "Differences as a table")));
  },
  rows() {
    return [["condition", "method", "against", "metric", "pairs", "difference", "low", "high", "verdict"],
      ...verdictRows().flatMap((row) => row.entries.map(({ method, found }) => [row.title, page.data.methods[method].title, page.data.methods[page.base].title, page.metric.name, found.pairs, found.mean, found.low, found.high, found.word]))];
  },
  panels(rows) {
    return rows.map((row) => ({ title: row.title, draw: (width) => forest(row, width, forestRange(row)) }));
  },
  drawings() { return forFile(this.panels(verdictRows())); },
  legend: false,
  draw(host) {
    const { data, metric } = page;
    syncOptions(host.querySelector("#metric"), data.metrics.map((one) => [one.name, one.label]), metric.name);
    syncOptions(host.querySelector("#base"), data.methods.map((method) => [method.title, method.title]), data.methods[page.base].title);
    const rows = verdictRows();
    const found = sentences(rows);
    host.querySelector("#verdicts").replaceChildren(...found.map(({ method, text, words }) => make("li", {}, swatch(method), " ", make("b", {}, data.methods[method].title), `: ${text}`, words.length > 1 ? ` of ${words.length} conditions` : "")));
    const nothing = host.querySelector(".missing");
    nothing.hidden = rows.length > 0;
    nothing.textContent = `Nothing in view was run under the same condition as ${data.methods[page.base].title}; choose another to compare with.`;
    showPanels(host.querySelector("#verdict-panels"), this.panels(page.state.all ? rows : rows.slice(0, MOST_PANELS)), rows.length);
    const without = page.conditions.filter((condition) => !baseUnder(condition.index)).length;
    host.querySelector(".hint").textContent =
      `Each method minus ${data.methods[page.base].title} on the same seeds${metric.percent ? ", in points" : ""}: mean and ${Math.round(100 * data.sure)} % interval by Student's t. ` +
      `“Level” means that the interval holds zero: these seeds show no difference. Fewer than ${data.fewest} pairs decide nothing.` +
      (without ? ` ${without} condition${without === 1 ? " has" : "s have"} no run of ${data.methods[page.base].title}.` : "") +
      (found.some(({ words }) => words.length > 1) ? " Of many intervals one in twenty misses by chance; fedproto compare --json has p-values corrected for that." : "");
    const interval = (one) => (one.low === null ? "–" : `${signed(metric, one.low)} to ${signed(metric, one.high)}`);
    host.querySelector("#verdict-table").replaceChildren(tableOf(["condition", "method", "pairs", "difference", "interval", "verdict"],
      rows.flatMap((row) => row.entries.map(({ method, found: one }) => [row.title, make("td", { class: "words" }, swatch(method), " ", data.methods[method].title), String(one.pairs), signed(metric, one.mean), interval(one), one.word]))));
  },
});

page.sections.push({
  id: "matrix",
  title: "Methods × conditions",
  short: "Methods",
  empty() {
    return page.data.metrics.length ? null : ["No round is tested yet.", null];
  },
  build(host) {
    host.append(make("p", { class: "hint" }), make("div", { id: "matrix-tables" }));
  },
  rows() {
    return [["method", "condition", "metric", "mean", "sample_std", "seeds"], ...page.conditions.flatMap((condition) => condition.groups.map((group) => {
      const found = figure(group, page.metric.name);
      return [methodTitle(group), titleOf(condition), page.metric.name, found && found.mean, found && found.deviation, group.seeds.length];
    }))];
  },
  draw(host) {
    const { metric } = page;
    const baseTitle = page.data.methods[page.base]?.title;
    host.querySelector(".hint").replaceChildren(`${metric.label}${metric.percent ? " in %" : ""}, mean over the last ${Math.round(100 * page.data.window)} % of the rounds ± sample standard deviation over seeds. ${isDark() ? "Brighter" : "Darker"} is better within a data set. `,
      `Against ${baseTitle}: ${Object.entries(WORDS).map(([word, mark]) => `${mark} ${word}`).join(", ")}.`);
    const tested = page.conditions.filter((condition) => condition.groups.some((group) => figure(group, metric.name)));
    const families = [...new Set(tested.map((condition) => condition.family))];
    const without = new Set(page.conditions.map((condition) => condition.family)).size - families.length;
    if (without) host.querySelector(".hint").append(` ${without} data set${without === 1 ? " has" : "s have"} no ${metric.label}: compare by another metric to see them.`);
    host.querySelector("#matrix-tables").replaceChildren(...families.map((family) => {
      const conditions = tested.filter((condition) => condition.family === family);
      const methods = page.methods.filter((method) => conditions.some((condition) => condition.groups.some((group) => group.method === method)));
      const cells = methods.map((method) => conditions.map((condition) => condition.groups.find((group) => group.method === method)));
      const range = extent(cells.map((row) => row.map((group) => (group ? figure(group, metric.name)?.mean ?? null : null)))) || [0, 1];
      const name = (condition) => Object.entries(condition.parts).map(([part, value]) => (value === "true" ? part : value === "false" ? `no ${part}` : `${part} ${value}`)).join(" · ") || family;
      const scroller = scrolling(null, `${metric.label}, ${family}`,
        tableOf([make("th", { scope: "col" }, page.several.families ? family : "method"), ...conditions.map(name)], methods.map((method, index) => [
          [swatch(method), " ", page.data.methods[method].title],
          ...cells[index].map((group, column) => matrixCell(group, conditions[column].index, range))])));
      scroller.classList.add("tall");
      return make("div", { class: "matrix" }, scroller);
    }));
  },
});

function matrixCell(group, index, [low, high]) {
  const found = group && figure(group, page.metric.name);
  if (!found) return make("td", { class: "none" }, "–");
  const share = high > low ? (found.mean - low) / (high - low) : 0.5;
  const [red, green, blue] = shade(page.metric.lower ? 1 - share : share);
  const verdict = verdictOf(group, index);
  const cell = make("td", { class: "shaded" }, withDeviation(page.metric, found), verdict ? make("span", { class: "sign", title: verdict.word, role: "img", "aria-label": verdict.word }, WORDS[verdict.word]) : null);
  cell.style.background = `rgb(${red} ${green} ${blue})`;
  cell.style.color = luminance(red, green, blue) > 0.179 ? "#000" : "#fff";
  return cell;
}

// How bright a colour is to the eye; where black and white are equally readable it is 0.179.
function luminance(...channels) {
  const [red, green, blue] = channels.map((value) => (value / 255 <= 0.04045 ? value / 255 / 12.92 : ((value / 255 + 0.055) / 1.055) ** 2.4));
  return 0.2126 * red + 0.7152 * green + 0.0722 * blue;
}

// From pale to a deep blue, dark where much: read in grey and with any colour vision.
function shade(share) {
  return between(isDark() ? [[40, 48, 60], [58, 110, 160], [160, 210, 245]] : [[247, 249, 252], [158, 196, 226], [12, 74, 128]], share);
}
