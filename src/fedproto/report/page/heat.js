// A heat map: one byte a cell, joined neighbours, a scale with ticks, a line of text for the cell pointed at.

const CIVIDIS = [[0, 34, 78], [65, 77, 107], [124, 123, 120], [188, 175, 111], [254, 232, 56]];

// Much stands out from the background: dark on light, bright on dark.
function sequential(share) {
  return between(CIVIDIS, isDark() ? 0.15 + 0.85 * share : 1 - share);
}

function diverging(share) {
  const middle = isDark() ? [70, 76, 86] : [216, 216, 216];
  const ends = isDark() ? [[86, 180, 233], [255, 140, 50]] : [[0, 114, 178], [213, 94, 0]];
  return between([ends[0], middle, ends[1]], share);
}

// spec: { label, color, base, ticks: [[share, text]], scaleName, rowNames, rowName, columnName, firstColumn, describe(row, column, share) }
function heatDrawing(grid, spec, width) {
  const names = spec.rowNames ? spec.rowNames.map((name) => shortened(name, 16)) : null;
  const left = names ? Math.min(140, 32 + 7 * Math.max(...names.map((name) => name.length))) : 62;
  const cell = Math.min(18, Math.max(3, Math.floor(380 / grid.rows)));
  const area = { left, top: 6, width: width - left - 14, height: grid.rows * cell };
  const below = area.top + area.height;
  const svg = svgOf(width, below + 84, spec.label);
  svg.append(
    makeSvg("rect", { x: area.left - 0.5, y: area.top - 0.5, width: area.width + 1, height: area.height + 1, fill: variable("--panel"), stroke: variable("--line") }),
    makeSvg("image", { href: cellPicture(grid, spec.color), x: area.left, y: area.top, width: area.width, height: area.height, preserveAspectRatio: "none", style: "image-rendering: pixelated" }));
  if (names) {
    const every = Math.ceil(13 / cell);
    for (let row = 0; row < grid.rows; row += every) svg.append(textAt(area.left - 6, area.top + (row + 0.5) * cell + 4, names[row], { "text-anchor": "end" }));
  } else {
    for (const mark of marks(0, grid.total_rows - 1, 6, true)) {
      svg.append(textAt(area.left - 6, area.top + (mark + 0.5) / (grid.rows * grid.row_span) * area.height + 4, String(mark), { "text-anchor": "end" }));
    }
  }
  svg.append(textAt(0, 0, spec.rowName, { "text-anchor": "middle", transform: `translate(12 ${area.top + area.height / 2}) rotate(-90)` }));
  for (const mark of marks(spec.firstColumn, grid.total_columns - 1 + spec.firstColumn, width < 480 ? 4 : 8, true)) {
    const x = area.left + (mark - spec.firstColumn + 0.5) / (grid.columns * grid.column_span) * area.width;
    svg.append(textAt(x, below + 16, String(mark), { "text-anchor": "middle" }));
  }
  svg.append(textAt(area.left + area.width / 2, below + 32, spec.columnName, { "text-anchor": "middle" }));
  drawScale(svg, spec, area.left, below + 46, Math.min(320, area.width));
  Object.assign(svg, { area, grid });
  return svg;
}

function drawScale(svg, spec, x, y, width) {
  const id = `scale-${drawScale.count = (drawScale.count || 0) + 1}`;
  const stops = [0, 0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875, 1];
  svg.append(
    makeSvg("linearGradient", { id }, stops.map((share) => makeSvg("stop", { offset: share, "stop-color": `rgb(${spec.color(share).join(",")})` }))),
    makeSvg("rect", { class: "scale", x, y, width, height: 10, fill: `url(#${id})`, stroke: variable("--line") }),
    ...spaced(spec.ticks, width).flatMap(([share, text]) => [lineAt(x + share * width, y + 10, x + share * width, y + 14, { stroke: variable("--faint") }), textAt(x + share * width, y + 26, text, { "text-anchor": "middle" })]),
    textAt(x + width + 14, y + 10, spec.scaleName));
}

// Only as many ticks as have room for their texts.
function spaced(ticks, width) {
  let end = -Infinity;
  return ticks.filter(([share, text]) => {
    const [left, right] = [share * width - 3.6 * text.length, share * width + 3.6 * text.length];
    if (left < end + 4) return false;
    end = right;
    return true;
  });
}

// Shows a heat map that can be read by pointer and arrow keys.
function heatMap(host, grid, spec) {
  const svg = heatDrawing(grid, spec, widthOf(host));
  const cells = bytesOf(grid.cells);
  const readout = host.querySelector(".readout") || make("p", { class: "readout hint", role: "status" });
  host.replaceChildren(svg, readout);
  host.setAttribute("tabindex", 0);
  host.setAttribute("role", "group");
  host.setAttribute("aria-label", `${spec.label}. Arrow keys read single cells.`);
  const say = (row, column) => {
    const code = cells[row * grid.columns + column];
    readout.textContent = spec.describe(row, column, code === 0 ? null : (code - 1) / 254);
  };
  host.onpointermove = (event) => {
    const [x, y] = at(event, svg);
    const column = Math.floor((x - svg.area.left) / svg.area.width * grid.columns);
    const row = Math.floor((y - svg.area.top) / svg.area.height * grid.rows);
    if (row >= 0 && row < grid.rows && column >= 0 && column < grid.columns) {
      host.cell = [row, column];
      say(row, column);
    }
  };
  host.onpointerdown = host.onpointermove;
  host.onkeydown = (event) => {
    const step = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
    if (!step) return;
    event.preventDefault();
    const from = host.cell || [0, -1];
    const clamp = (value, most) => Math.min(Math.max(value, 0), most - 1);
    host.cell = [clamp(from[0] + step[0], grid.rows), clamp(from[1] + step[1], grid.columns)];
    say(...host.cell);
  };
}

function cellPicture(grid, color) {
  const cells = bytesOf(grid.cells);
  const picture = make("canvas", { width: grid.columns, height: grid.rows });
  const context = picture.getContext("2d");
  const image = context.createImageData(grid.columns, grid.rows);
  const colors = Array.from({ length: 256 }, (_, code) => color((code - 1) / 254));
  for (let index = 0; index < cells.length; index++) {
    if (cells[index] === 0) continue;
    image.data.set(colors[cells[index]], 4 * index);
    image.data[4 * index + 3] = 255;
  }
  context.putImageData(image, 0, 0);
  return picture.toDataURL();
}

function spanText(index, span, total, first) {
  const from = index * span + first;
  const to = Math.min((index + 1) * span, total) - 1 + first;
  return from === to ? String(from) : `${from}–${to}`;
}
