// Curves over rounds: which metric, how smooth, which scale; one line per group or per seed.

const decoded = new WeakMap();

function curveOf(run, name) {
  const curve = run.curves[name];
  if (!curve) return null;
  if (!decoded.has(curve)) {
    const y = Array.from(new Float32Array(bytesOf(curve.y).buffer));
    const x = curve.even ? y.map((_, place) => curve.x[0] + place * curve.x[1]) : curve.x;
    decoded.set(curve, { x, y });
  }
  return decoded.get(curve);
}

// The mean over the rounds of the last `share` of the run, as the tables have it.
function smoothed({ x, y }, share, planned) {
  const width = Math.max(1, Math.round(share * planned));
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

function meanOf(curves) {
  if (curves.length === 1) return { x: curves[0].x, mean: curves[0].y, spread: null };
  const tables = curves.map(({ x, y }) => new Map(x.map((place, index) => [place, y[index]])));
  const x = curves[0].x.filter((place) => tables.every((table) => table.has(place)));
  const mean = [];
  const spread = [];
  for (const place of x) {
    const values = tables.map((table) => table.get(place));
    const middle = values.reduce((sum, value) => sum + value, 0) / values.length;
    mean.push(middle);
    spread.push(Math.sqrt(values.reduce((sum, value) => sum + (value - middle) ** 2, 0) / values.length));
  }
  return { x, mean, spread };
}

function curveLines(name, share, everySeed) {
  const lines = [];
  for (const group of shownGroups()) {
    const runs = page.data.runs.filter((run) => run.group === group.place && run.curves[name]);
    const curves = runs.map((run) => smoothed(curveOf(run, name), share, run.planned));
    if (everySeed) {
      curves.forEach((curve, place) => lines.push({ x: curve.x, mean: curve.y, spread: null, label: runTitle(runs[place]), group: group.place, thin: curves.length > 1 }));
    } else if (curves.length) {
      lines.push({ ...meanOf(curves), label: group.title, group: group.place });
    }
  }
  return lines;
}

page.sections.push({
  id: "curves",
  title: "Curves",
  build(host) {
    const redraw = () => this.draw(host);
    const state = page.state;
    state.smoothing = Math.round(100 * page.data.window);
    host.append(
      make("div", { class: "controls" },
        make("label", {}, "Metric ", make("select", { id: "metric", onchange: (event) => { state.metric = event.target.value; state.zoom.curves = null; redraw(); } })),
        make("label", {}, "Smoothing ",
          make("input", { id: "smoothing", type: "range", min: 0, max: 30, step: 1, value: state.smoothing, oninput: (event) => { state.smoothing = Number(event.target.value); redraw(); } }),
          make("output", { id: "smoothing-text", for: "smoothing" })),
        make("label", {}, make("input", { id: "log", type: "checkbox", onchange: (event) => { state.log = event.target.checked; redraw(); } }), "log scale"),
        make("label", { id: "seeds-control" }, make("input", { id: "every-seed", type: "checkbox", onchange: (event) => { state.everySeed = event.target.checked; redraw(); } }), "every seed")),
      make("figure", {}, make("div", { class: "chart", id: "curves-chart", tabindex: 0, role: "group" }), make("figcaption", {})));
  },
  draw(host) {
    const { state, data } = page;
    const options = data.metrics.map((metric) => [metric.name, metric.label]);
    if (!options.some(([name]) => name === state.metric)) state.metric = options.length ? options[0][0] : null;
    syncOptions(host.querySelector("#metric"), options, state.metric);
    const severalSeeds = data.groups.some((group) => group.seeds.length > 1);
    host.querySelector("#seeds-control").hidden = !severalSeeds;
    const chart = host.querySelector("#curves-chart");
    const caption = host.querySelector("figcaption");
    const planned = Math.max(0, ...data.runs.map((run) => run.planned));
    const rounds = Math.max(1, Math.round(state.smoothing / 100 * planned));
    host.querySelector("#smoothing-text").textContent = rounds < 2 ? "off" : `${state.smoothing} % (${rounds} rounds)`;
    host.querySelector("#smoothing").setAttribute("aria-valuetext", rounds < 2 ? "off" : `${rounds} rounds`);
    if (!state.metric) {
      chart.chart?.destroy();
      chart.chart = null;
      chart.replaceChildren(make("p", { class: "missing" }, "No round is finished yet."));
      caption.textContent = "";
      return;
    }
    const metric = metricNamed(state.metric);
    const lines = curveLines(metric.name, state.smoothing / 100, state.everySeed);
    const { xs, spread } = aligned(lines);
    const positive = (values) => (state.log ? values.map((value) => (value > 0 ? value : null)) : values);
    const series = lines.map((one) => ({
      label: one.label, group: one.group, thin: one.thin, values: spread(one.x, positive(one.mean)),
      low: one.spread && spread(one.x, one.mean.map((value, place) => (state.log ? Math.max(value - one.spread[place], value / 10) : value - one.spread[place]))),
      high: one.spread && spread(one.x, one.mean.map((value, place) => value + one.spread[place])),
    }));
    lineChart(chart, { key: "curves", label: `${metric.label} over rounds`, xs, series, xName: "round", whole: true, share: metric.percent, log: state.log, format: formatAs(metric), formatMark: markAs(metric) });
    const joined = Math.max(1, ...data.runs.map((run) => run.curves[metric.name]?.joined || 1));
    caption.textContent = `${metric.label} over rounds` +
      (severalSeeds && !state.everySeed ? "; line: mean over seeds, band: one standard deviation" : "") +
      (rounds > 1 ? `; moving average over ${rounds} rounds` : "") +
      (joined > 1 ? `; each point is the mean of ${joined} tests` : "") + ".";
  },
});
