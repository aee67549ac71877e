// Charts as SVG: axes with titles, lines with bands, points.

const FONT = 'system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif';
const SHAPES = [
  (x, y) => `M${x - 5},${y}a5,5 0 1,0 10,0a5,5 0 1,0 -10,0`,
  (x, y) => `M${x - 4.5},${y - 4.5}h9v9h-9z`,
  (x, y) => `M${x},${y - 6}l6,10h-12z`,
  (x, y) => `M${x},${y - 6}l6,6l-6,6l-6,-6z`,
  (x, y) => `M${x},${y + 6}l6,-10h-12z`,
];

function markOf(method, x, y) {
  return makeSvg("path", { class: "dot", d: SHAPES[method % SHAPES.length](x, y), fill: colorOf(method), stroke: variable("--paper"), "stroke-width": 1 });
}

function svgOf(width, height, label, attributes = {}) {
  return makeSvg("svg", {
    viewBox: `0 0 ${width} ${height}`, width, height, role: "img", "aria-label": label,
    "font-family": FONT, "font-size": 12, ...attributes,
  });
}

function textAt(x, y, text, attributes = {}) {
  return makeSvg("text", { x, y, fill: variable("--faint"), ...attributes }, text);
}

function shortened(text, most) {
  return text.length > most ? `${text.slice(0, most - 1)}…` : text;
}

function lineAt(x1, y1, x2, y2, attributes = {}) {
  return makeSvg("line", { x1, y1, x2, y2, stroke: variable("--line"), ...attributes });
}

// Round numbers from low to high, about `count` of them.
function marks(low, high, count, whole = false) {
  if (!(high > low)) return [low];
  const rough = (high - low) / count;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = Math.max(whole ? 1 : 0, (whole && power < 10 ? [1, 2, 5, 10] : [1, 2, 2.5, 5, 10]).map((factor) => factor * power).find((each) => each >= rough));
  const found = [];
  for (let index = Math.ceil(low / step - 1e-9); index * step <= high + 1e-9 * step; index++) found.push(index * step);
  return found;
}

// Powers, and twice and five times those of ten where there is room.
function logMarks(low, high, base) {
  const found = [];
  const from = Math.floor(Math.log(low) / Math.log(base) + 1e-9);
  const to = Math.ceil(Math.log(high) / Math.log(base) - 1e-9);
  const every = Math.ceil((to - from) / 7) || 1;
  for (let power = from; power <= to; power += every) {
    for (const factor of base === 10 && to - from < 3 ? [1, 2, 5] : [1]) found.push(factor * base ** power);
  }
  return found.filter((mark) => mark >= low * 0.999 && mark <= high * 1.001);
}

// A scale from values to pixels; `log` is the base or false.
function scaleOf([low, high], [from, to], log) {
  const along = log ? (value) => Math.log(value) : (value) => value;
  const [start, end] = [along(low), along(high)];
  const scale = (value) => from + (along(value) - start) / (end - start || 1) * (to - from);
  scale.invert = (pixel) => {
    const at = start + (pixel - from) / (to - from) * (end - start);
    return log ? Math.exp(at) : at;
  };
  scale.range = [low, high];
  return scale;
}

function extent(lists, keep = () => true) {
  let [low, high] = [Infinity, -Infinity];
  for (const list of lists) {
    for (const value of list) {
      if (value === null || !keep(value)) continue;
      if (value < low) low = value;
      if (value > high) high = value;
    }
  }
  return low <= high ? [low, high] : null;
}

function yRangeOf(spec) {
  const { y } = spec;
  if (y.range) return y.range;
  // Bands may leave the frame: at the beginning of a run they would make everything else flat.
  const lists = [...(spec.lines || []).map((line) => line.y), (spec.points || []).map((point) => point.y)];
  const found = extent(lists, y.log ? (value) => value > 0 : undefined) || [0, 1];
  if (y.log) return found[0] === found[1] ? [found[0] / y.log, found[1] * y.log] : found;
  const room = Math.max(0.05 * (found[1] - found[0]), y.share ? 0.02 : 1e-9 + 0.01 * Math.abs(found[1]));
  const range = [found[0] - room, found[1] + room];
  return y.share ? [Math.max(0, range[0]), Math.min(1, range[1])] : found[0] >= 0 ? [Math.max(0, range[0]), range[1]] : range;
}

function xRangeOf(spec) {
  if (spec.x.range) return spec.x.range;
  const found = extent([...(spec.lines || []).map((line) => line.x), (spec.points || []).map((point) => point.x)]) || [0, 1];
  if (!spec.points) return found[0] === found[1] ? [found[0] - 0.5, found[1] + 0.5] : found;
  const room = 0.06 * (found[1] - found[0]) || 0.1 * Math.abs(found[1]) || 1;
  return [found[0] - room, found[1] + room];
}

// spec: { key, label, x: {name, mark, say, range, log, whole}, y: {name, mark, say, range, log, share},
//         lines: [{label, method | color, dash, thin, x, y, low, high}], points: [{label, method, x, y, text}], guides }
function chart(spec, width, height) {
  const svg = svgOf(width, height, spec.label, { class: "plot" });
  const yRange = yRangeOf(spec);
  const yMarks = (spec.y.log ? logMarks(...yRange, spec.y.log) : marks(...yRange, Math.max(3, Math.floor(height / 55))));
  const texts = yMarks.map((mark) => (spec.y.mark || formatNumber)(mark));
  const named = width >= 300 ? (spec.lines || []).filter((line) => line.named && line.y.length) : [];
  const room = named.length ? Math.min(0.34 * width, 16 + 7.6 * Math.max(...named.map((line) => line.label.length))) : 22;
  const area = { left: 30 + 7 * Math.max(2, ...texts.map((text) => text.length)), top: 8, right: width - room, bottom: height - 40 };
  const x = scaleOf(xRangeOf(spec), [area.left, area.right], spec.x.log);
  const y = scaleOf(yRange, [area.bottom, area.top], spec.y.log);
  const xMarks = spec.x.log ? logMarks(...x.range, spec.x.log) : marks(...x.range, Math.max(3, Math.floor((area.right - area.left) / 75)), spec.x.whole);
  const clip = `clip-${chart.count = (chart.count || 0) + 1}`;
  const inside = makeSvg("g", { "clip-path": `url(#${clip})` });
  svg.append(
    makeSvg("clipPath", { id: clip }, makeSvg("rect", { x: area.left - 4, y: area.top - 4, width: Math.max(1, area.right - area.left + 8), height: Math.max(1, area.bottom - area.top + 8) })),
    ...yMarks.flatMap((mark, index) => [lineAt(area.left, y(mark), area.right, y(mark)), textAt(area.left - 6, y(mark) + 4, texts[index], { "text-anchor": "end" })]),
    ...xMarks.flatMap((mark) => [lineAt(x(mark), area.top, x(mark), area.bottom), textAt(x(mark), area.bottom + 16, (spec.x.mark || formatNumber)(mark), { "text-anchor": "middle" })]),
    textAt((area.left + area.right) / 2, height - 6, spec.x.name, { "text-anchor": "middle" }),
    textAt(0, 0, spec.y.name, { "text-anchor": "middle", transform: `translate(13 ${(area.top + area.bottom) / 2}) rotate(-90)` }),
    inside);
  for (const [x1, y1, x2, y2] of spec.guides || []) inside.append(lineAt(x(x1), y(y1), x(x2), y(y2), { stroke: variable("--faint"), "stroke-dasharray": "4 4" }));
  if (spec.chance && spec.chance >= yRange[0]) inside.append(lineAt(area.left, y(spec.chance), area.right, y(spec.chance), { stroke: variable("--faint"), "stroke-dasharray": "2 3" }), textAt(area.right - 4, y(spec.chance) - 4, "chance", { "font-size": 11, "text-anchor": "end" }));
  for (const line of spec.lines || []) drawLine(inside, line, x, y, spec);
  nameLines(svg, named, y, area, room);
  for (const point of spec.points || []) {
    const mark = markOf(point.method, x(point.x), y(point.y));
    mark.append(makeSvg("title", {}, `${point.label}: ${point.text}`));
    inside.append(mark);
    if (point.ring) inside.append(makeSvg("circle", { cx: x(point.x), cy: y(point.y), r: 9, fill: "none", stroke: variable("--ink") }));
  }
  if (spec.points) namePoints(inside, spec.points, x, y, area);
  Object.assign(svg, { scales: { x, y }, area });
  return svg;
}

// Names at the ends of lines, moved apart where they would overlap.
function nameLines(svg, lines, y, area, room) {
  const places = lines.map((line) => ({ line, at: y(line.y.findLast((value) => value !== null)) })).sort((one, other) => one.at - other.at || mean(other.line.y) - mean(one.line.y));
  const gap = Math.min(14, (area.bottom - area.top) / Math.max(1, places.length));
  places.forEach((place, index) => { place.at = Math.max(place.at, index ? places[index - 1].at + gap : area.top + 4); });
  places.reduceRight((below, place) => (place.at = Math.min(place.at, below)) - gap, area.bottom);
  for (const { line, at } of places) svg.append(textAt(area.right + 6, at + 4, shortened(line.label, Math.floor((room - 8) / 7.6)), { "font-size": 11, fill: line.color || colorOf(line.method), "font-weight": 600 }));
}

// Names beside points, where they hide neither another name nor a point.
function namePoints(host, points, x, y, area) {
  const taken = points.map((point) => [x(point.x) - 7, y(point.y) - 7, x(point.x) + 7, y(point.y) + 7]);
  for (const point of points) {
    const text = shortened(point.label, 24);
    const length = 6.2 * text.length;
    const [px, py] = [x(point.x), y(point.y)];
    for (const [dx, dy] of [[11, 4], [-11 - length, 4], [11, 17], [-11 - length, 17], [11, -9], [-11 - length, -9]]) {
      const box = [px + dx, py + dy - 10, px + dx + length, py + dy + 3];
      const free = taken.every(([left, top, right, bottom]) => box[2] < left || box[0] > right || box[3] < top || box[1] > bottom);
      if (!free || box[0] < area.left || box[2] > area.right || box[1] < area.top - 6 || box[3] > area.bottom + 4) continue;
      taken.push(box);
      host.append(textAt(px + dx, py + dy, text, { "font-size": 11, fill: variable("--ink") }));
      break;
    }
  }
}

function drawLine(host, line, x, y, spec) {
  const stroke = line.color || colorOf(line.method);
  const positive = (value) => (spec.y.log && !(value > 0) ? null : value);
  if (line.low) {
    const there = pathOf(line.x, line.high.map(positive), x, y);
    const back = pathOf([...line.x].reverse(), [...line.low].reverse().map((value) => (spec.y.log ? Math.max(value, y.range[0] / 10) : value)), x, y);
    host.append(makeSvg("path", { d: `${there}${back.replace("M", "L")}Z`, fill: stroke, "fill-opacity": 0.16 }));
  }
  const dash = line.dash !== undefined ? line.dash : dashOf(line.method);
  host.append(makeSvg("path", { class: "curve", d: pathOf(line.x, line.y.map(positive), x, y), fill: "none", stroke, "stroke-width": line.thin ? 1 : 2, "stroke-opacity": line.thin && line.silent ? 0.4 : null, "stroke-dasharray": dash, "stroke-linejoin": "round" }));
  const drawn = line.y.filter((value) => positive(value) !== null);
  if (line.dots || drawn.length === 1) {
    line.y.forEach((value, index) => { if (positive(value) !== null) host.append(makeSvg("circle", { cx: x(line.x[index]), cy: y(value), r: 3, fill: stroke })); });
  }
}

function pathOf(xs, ys, x, y) {
  let path = "";
  let pen = false;
  for (let index = 0; index < xs.length; index++) {
    if (ys[index] === null) continue;
    path += `${pen ? "L" : "M"}${x(xs[index]).toFixed(1)},${y(ys[index]).toFixed(1)}`;
    pen = true;
  }
  return path;
}

// The colour at a share of a scale.
function between(colors, share) {
  const position = Math.min(Math.max(share, 0), 1) * (colors.length - 1);
  const low = Math.min(Math.floor(position), colors.length - 2);
  return colors[low].map((value, channel) => Math.round(value + (colors[low + 1][channel] - value) * (position - low)));
}
