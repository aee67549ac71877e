// A line chart on uPlot: a tip under the pointer, arrow keys, zoom that survives new data.

const WHOLE = [0, 1, 2, 3, 4, 5].flatMap((power) => [1, 2, 5].map((factor) => factor * 10 ** power));

// Room around shares of one, never outside 0 to 1, and not blown up when all are alike.
function shareRange(_, low, high) {
  if (low === null || high === null) return [0, 1];
  const room = Math.max(0.05 * (high - low), 0.02);
  return [Math.max(0, low - room), Math.min(1, high + room)];
}

// spec: { key, label, xs, series: [{ label, group, values, low, high, thin }], xName, log, format, formatMark, formatX, height, whole, share, range }
function lineChart(host, spec) {
  const old = host.chart;
  const kept = old && old.cursor.left >= 0 ? { left: old.cursor.left, top: old.cursor.top } : null;
  if (old) old.destroy();
  const ink = variable("--faint");
  const line = variable("--line");
  const columns = [spec.xs];
  const series = [{}];
  const bands = [];
  for (const one of spec.series) {
    const stroke = one.color || colorOf(one.group);
    series.push({
      label: one.label, stroke, width: one.thin ? 1 : 2, dash: one.dash || dashOf(one.group || 0),
      spanGaps: true, points: { show: one.values.filter((value) => value !== null).length === 1 },
    });
    columns.push(one.values);
    if (one.low) {
      const edge = { stroke: "transparent", width: 0, spanGaps: true, points: { show: false } };
      columns.push(one.high, one.low);
      series.push({ ...edge, label: "" }, { ...edge, label: "" });
      bands.push({ series: [series.length - 2, series.length - 1], fill: stroke + "2e" });
    }
  }
  const font = `12px ${getComputedStyle(document.body).fontFamily}`;
  const axis = { stroke: ink, font, grid: { stroke: line, width: 1 }, ticks: { stroke: line, width: 1 } };
  const scale = page.state.zoom[spec.key];
  const narrow = widthOf(host) < 480;
  const options = {
    width: widthOf(host), height: spec.height || (narrow ? 260 : 340), padding: [12, 26, 0, 0],
    scales: {
      x: { time: false, ...(scale ? { min: scale[0], max: scale[1] } : {}) },
      y: spec.log ? { distr: 3, log: 10 } : spec.range ? { range: spec.range } : spec.share ? { range: shareRange } : {},
    },
    axes: [
      { ...axis, ...(spec.whole ? { incrs: WHOLE } : {}), label: spec.xName, labelSize: 22, labelFont: font, size: 34, values: (_, marks) => marks.map((mark) => (mark === null ? "" : spec.formatX ? spec.formatX(mark) : formatNumber(mark))) },
      { ...axis, size: 58, values: (_, marks) => marks.map((mark) => (mark === null ? "" : (spec.formatMark || spec.format)(mark))) },
    ],
    series, bands, legend: { show: false },
    cursor: { drag: { x: true, y: false }, points: { size: 7 }, focus: { prox: -1 } },
    hooks: {
      setCursor: [(chart) => showTip(host, chart, spec)],
      setScale: [(chart, key) => { if (key === "x" && host.ready) rememberZoom(chart, spec); }],
    },
  };
  host.ready = false;
  host.replaceChildren();
  const tip = make("div", { class: "tip", hidden: true });
  const said = make("p", { class: "quiet", role: "status" });
  host.chart = new uPlot(options, columns, host);
  host.append(tip, said);
  host.tip = tip;
  host.said = said;
  host.setAttribute("aria-label", `${spec.label}. Arrow keys read the values.`);
  host.onkeydown = (event) => moveCursor(event, host, spec);
  host.onblur = () => { tip.hidden = true; };
  host.ready = true;
  if (kept) host.chart.setCursor(kept);
  return host.chart;
}

function rememberZoom(chart, spec) {
  const { min, max } = chart.scales.x;
  const whole = min <= spec.xs[0] && max >= spec.xs[spec.xs.length - 1];
  page.state.zoom[spec.key] = whole ? null : [min, max];
}

function valuesAt(spec, place) {
  return spec.series.filter((one) => one.values[place] !== null && one.values[place] !== undefined)
    .map((one) => ({ ...one, value: one.values[place] }))
    .sort((one, other) => other.value - one.value);
}

function showTip(host, chart, spec) {
  const { idx, left, top } = chart.cursor;
  const tip = host.tip;
  if (!tip) return;
  const values = idx === null || idx === undefined || left < 0 ? [] : valuesAt(spec, idx);
  tip.hidden = values.length === 0;
  if (tip.hidden) return;
  const rows = values.slice(0, 12).map((one) => make("div", {},
    one.color ? null : swatch(one.group), one.label, make("b", {}, spec.format(one.value))));
  if (values.length > 12) rows.push(make("div", {}, `and ${values.length - 12} more`));
  tip.replaceChildren(make("strong", {}, `${spec.xName} ${spec.formatX ? spec.formatX(spec.xs[idx]) : formatNumber(spec.xs[idx])}`), ...rows);
  const area = chart.over;
  const x = area.offsetLeft + left;
  const right = x + 16 + tip.offsetWidth < host.clientWidth;
  tip.style.left = `${Math.max(0, right ? x + 16 : x - 16 - tip.offsetWidth)}px`;
  tip.style.top = `${Math.max(0, area.offsetTop + Math.min(top, area.clientHeight - tip.offsetHeight))}px`;
}

function moveCursor(event, host, spec) {
  const steps = { ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10, Home: -Infinity, End: Infinity };
  if (!(event.key in steps) || spec.xs.length === 0) return;
  event.preventDefault();
  const chart = host.chart;
  const from = chart.cursor.idx === null || chart.cursor.idx === undefined || chart.cursor.left < 0 ? -1 : chart.cursor.idx;
  const place = Math.min(spec.xs.length - 1, Math.max(0, from + steps[event.key]));
  const first = valuesAt(spec, place)[0];
  chart.setCursor({ left: chart.valToPos(spec.xs[place], "x"), top: first ? chart.valToPos(first.value, "y") : 0 });
  host.said.textContent = `${spec.xName} ${formatNumber(spec.xs[place])}: ` +
    valuesAt(spec, place).map((one) => `${one.label} ${spec.format(one.value)}`).join(", ");
}

// Curves with points at different places, over all of these places.
function aligned(curves) {
  const places = new Set();
  for (const curve of curves) for (const x of curve.x) places.add(x);
  const xs = [...places].sort((one, other) => one - other);
  const at = new Map(xs.map((x, place) => [x, place]));
  const spread = (x, values) => {
    const column = new Array(xs.length).fill(null);
    x.forEach((place, index) => { column[at.get(place)] = values[index]; });
    return column;
  };
  return { xs, spread };
}
