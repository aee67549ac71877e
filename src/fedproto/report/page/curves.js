// Curves: over rounds, megabytes or seconds; one panel per condition, one line per method or seed.

const MOST_COLORED = 6;
const FEW_SEEDS = 6;

function curveOf(run, name) {
  return run.curves[name] || null;
}

// Rounds that a moving average over a share of them spans; as `smoothing_width`, halves count up.
function smoothingWidth(share, planned) {
  return Math.max(1, Math.floor(share * planned + 0.5));
}

function smoothed({ x, y }, share, planned) {
  const width = smoothingWidth(share, planned);
  if (width === 1) return { x, y };
  const values = [];
  let sum = 0;
  let start = 0;
  for (let end = 0; end < x.length; end++) {
    sum += y[end];
    while (x[start] <= x[end] - width) sum -= y[start++];
    values.push(sum / (end - start + 1));
  }
  return { x, y: values };
}

// The megabytes or seconds that a run had spent after some rounds.
function spentAt(run, kind, rounds) {
  const clock = run[kind];
  const { spent } = clock;
  return rounds.map((round) => {
    const position = round / clock.step - 1;
    const low = Math.min(Math.max(Math.floor(position), -1), spent.length - 1);
    const before = low < 0 ? 0 : spent[low];
    const after = low + 1 < spent.length ? spent[low + 1] : clock.total;
    return position <= low ? before : before + (after - before) * (position - low);
  });
}

const X_AXES = {
  round: { name: "round", whole: true },
  megabytes: { name: "megabytes sent and received" },
  seconds: { name: "seconds of training" },
};

function meanOf(curves) {
  if (curves.length === 1) return { ...curves[0], deviation: null };
  const same = curves.every((curve) => curve.x.length === curves[0].x.length && curve.x.every((value, index) => value === curves[0].x[index]));
  const tables = same ? null : curves.map(({ x }) => new Map(x.map((value, index) => [value, index])));
  const kept = same ? curves[0].x : curves[0].x.filter((value) => tables.every((table) => table.has(value)));
  const found = { x: kept, y: [], spent: [], deviation: [] };
  kept.forEach((value, index) => {
    const places = curves.map((_, one) => (same ? index : tables[one].get(value)));
    const values = curves.map((curve, one) => curve.y[places[one]]);
    found.y.push(mean(values));
    found.deviation.push(sampleDeviation(values));
    found.spent.push(mean(curves.map((curve, one) => curve.spent[places[one]])));
  });
  return found;
}

// Groups with how their lines look: beyond six methods all but the baseline and the best are grey and come first.
function withGrey(family, groups, name) {
  const key = (group) => (group.method === baseIn(family) ? Infinity : (metricNamed(name).lower ? -1 : 1) * (figureOf([group], name)?.mean ?? -Infinity));
  const best = new Set([...groups].sort((one, other) => key(other) - key(one)).slice(0, MOST_COLORED));
  return [...groups].sort((one, other) => best.has(one) - best.has(other)).map((group) => [group, best.has(group) ? {} : { color: variable("--line"), dash: null }]);
}

// Lines of a condition: { label, method, color, x, y, low, high, thin, silent }. Means are labelled; with fewer than
// six seeds each has a thin line, else a band shows the deviation; beyond six methods the rest is grey.
function curveLines(condition, name, share, everySeed, axis) {
  const groups = condition.groups.filter((group) => page.runsOf.get(group.index).some((run) => run.curves[name]));
  const lines = [];
  for (const [group, grey] of withGrey(condition.family, groups, name)) {
    const runs = page.runsOf.get(group.index).filter((run) => run.curves[name]);
    const curves = runs.map((run) => {
      const curve = smoothed(curveOf(run, name), share, run.planned);
      return { ...curve, spent: axis === "round" ? curve.x : spentAt(run, axis, curve.x) };
    });
    const title = methodTitle(group);
    const line = (curve, label, more) => ({ label, method: group.method, x: curve.spent, y: curve.y, ...grey, ...more });
    const seeds = curves.length > 1 && (everySeed || (curves.length < FEW_SEEDS && !grey.color));
    if (seeds) curves.forEach((curve, index) => lines.push(line(curve, `${title}, seed ${runs[index].seed}`, { thin: true, silent: !everySeed })));
    if (everySeed && seeds) continue;
    const middle = meanOf(curves);
    const band = middle.deviation && !seeds && !grey.color ? { low: middle.y.map((value, index) => value - middle.deviation[index]), high: middle.y.map((value, index) => value + middle.deviation[index]) } : {};
    lines.push(line(middle, title, { ...band, named: !grey.color }));
  }
  return lines;
}

// Panels of one data set share their scale.
function rangesByFamily(drawings, share) {
  const found = new Map();
  for (const { family, spec } of drawings) found.set(family, [...(found.get(family) || []), ...spec.lines]);
  for (const [family, lines] of found) found.set(family, yRangeOf({ lines, y: { share, log: page.state.log ? 10 : false } }));
  return found;
}

page.sections.push({
  id: "curves",
  title: "Curves",
  empty() {
    return page.data.metrics.length ? null : ["No round is finished yet.", null];
  },
  build(host) {
    host.append(
      make("div", { class: "controls" },
        chooser("curve-metric", "Metric", "metric"),
        chooser("x-axis", "over", "x", [["round", "rounds"], ["megabytes", "megabytes"], ["seconds", "seconds"]]),
        make("label", {}, "smoothed over ",
          make("input", { id: "smoothing", type: "range", min: 0, max: 30, step: 1, oninput: (event) => change({ smooth: Number(event.target.value) }) }),
          make("output", { id: "smoothing-text", for: "smoothing" })),
        switcher("log", "log scale", "log"), switcher("every-seed", "every seed", "seeds")),
      make("div", { id: "curves-panels" }), make("p", { class: "hint" }));
  },
  panels(all) {
    const { state, metric } = page;
    const axis = X_AXES[state.x] ? state.x : "round";
    const { total, shown } = having((group) => page.runsOf.get(group.index).some((run) => run.curves[metric.name]), all);
    const drawings = shown.map((condition) => ({ title: titleOf(condition), family: condition.family, height: total === 1 ? 340 : 240, spec: {
      label: `${metric.label} over ${X_AXES[axis].name}, ${titleOf(condition)}`,
      lines: curveLines(condition, metric.name, state.smooth / 100, state.seeds, axis), chance: /(^|_)accuracy$/.test(metric.name) && !/client|tenth|zero|personal|finetuned/.test(metric.name) ? condition.chance : null,
      x: X_AXES[axis], y: { name: metric.label, mark: markAs(metric), say: formatAs(metric), log: state.log ? 10 : false },
    } }));
    const ranges = rangesByFamily(drawings, metric.percent);
    for (const drawing of drawings) drawing.spec.y.range = ranges.get(drawing.family);
    return { total, drawings };
  },
  rows() {
    return [["condition", "method", X_AXES[page.state.x].name, page.metric.name, "low", "high"],
      ...this.panels(true).drawings.flatMap(({ title, spec }) => spec.lines.flatMap((line) => line.x.map((x, index) => [title, line.label, x, line.y[index], line.low?.[index], line.high?.[index]])))];
  },
  draw(host) {
    const { state, data, metric } = page;
    syncOptions(host.querySelector("#curve-metric"), data.metrics.map((one) => [one.name, one.label]), metric.name);
    host.querySelector("#x-axis").value = state.x;
    host.querySelector("#log").checked = state.log;
    host.querySelector("#every-seed").checked = state.seeds;
    host.querySelector("#every-seed").parentElement.hidden = !page.several.seeds;
    const planned = Math.max(0, ...data.runs.map((run) => run.planned));
    const rounds = smoothingWidth(state.smooth / 100, planned);
    const slider = host.querySelector("#smoothing");
    slider.value = state.smooth;
    host.querySelector("#smoothing-text").textContent = rounds < 2 ? "off" : `${state.smooth} % of the rounds`;
    slider.setAttribute("aria-valuetext", rounds < 2 ? "off" : `${state.smooth} % of the rounds`);
    const { total, drawings } = this.panels(false);
    showPanels(host.querySelector("#curves-panels"), drawings, total);
    const joined = Math.max(1, ...data.runs.map((run) => run.curves[metric.name]?.joined || 1));
    host.querySelector(".hint").textContent = [
      page.several.seeds && !state.seeds ? `Line: mean over seeds; thin lines: single seeds, or from ${FEW_SEEDS} seeds a band of one sample standard deviation.` : "",
      page.conditions.some((condition) => condition.groups.length > MOST_COLORED) ? `Coloured: the baseline and the best ${MOST_COLORED - 1}.` : "",
      rounds > 1 ? `Moving average over the last ${state.smooth} % of the rounds.` : "",
      joined > 1 ? `Each point is the mean of ${joined} tests.` : "",
      page.conditions.length > 1 ? "Panels of one data set share their y axis." : "",
    ].filter(Boolean).join(" ");
  },
});
