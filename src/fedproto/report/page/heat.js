// A heat map on a canvas: one byte a cell, joined neighbours, a line of text for the cell pointed at.

const CIVIDIS = [[0, 34, 78], [65, 77, 107], [124, 123, 120], [188, 175, 111], [254, 232, 56]];

function between(colors, share) {
  const place = Math.min(Math.max(share, 0), 1) * (colors.length - 1);
  const low = Math.min(Math.floor(place), colors.length - 2);
  return colors[low].map((value, channel) => Math.round(value + (colors[low + 1][channel] - value) * (place - low)));
}

// Much stands out from the background: dark on light, bright on dark.
function sequential(share) {
  return between(CIVIDIS, isDark() ? 0.15 + 0.85 * share : 1 - share);
}

function diverging(share) {
  const middle = isDark() ? [70, 76, 86] : [216, 216, 216];
  const ends = isDark() ? [[86, 180, 233], [255, 140, 50]] : [[0, 114, 178], [213, 94, 0]];
  return between([ends[0], middle, ends[1]], share);
}

// spec: { label, color, value(share), rowNames, rowName, columnName, firstColumn, describe(row, column, value) }
function heatMap(host, grid, spec) {
  if (!host.canvas) {
    host.canvas = make("canvas", { tabindex: 0, role: "img" });
    host.readout = make("p", { class: "readout hint", role: "status" });
    host.replaceChildren(host.canvas, host.readout);
  }
  const canvas = host.canvas;
  const cells = bytesOf(grid.cells);
  const width = widthOf(host);
  const context = canvas.getContext("2d");
  const font = `12px ${getComputedStyle(document.body).fontFamily}`;
  context.font = font;
  const names = spec.rowNames ? spec.rowNames.map((name) => (name.length > 16 ? `${name.slice(0, 15)}…` : name)) : null;
  const left = names ? Math.min(130, 12 + Math.max(...names.map((name) => context.measureText(name).width))) : 62;
  const right = 14;
  const cell = Math.min(18, Math.max(2, Math.floor(400 / grid.rows)));
  const plot = { left, top: 6, width: width - left - right, height: grid.rows * cell };
  const height = plot.top + plot.height + 40;
  const ratio = page.printing ? 2 : window.devicePixelRatio || 1;
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  canvas.style.width = `${width}px`;
  canvas.style.height = `${height}px`;
  canvas.setAttribute("aria-label", `${spec.label}. Arrow keys read single cells.`);
  context.scale(ratio, ratio);
  context.fillStyle = variable("--panel");
  context.fillRect(plot.left, plot.top, plot.width, plot.height);
  context.imageSmoothingEnabled = false;
  context.strokeStyle = variable("--line");
  context.strokeRect(plot.left - 0.5, plot.top - 0.5, plot.width + 1, plot.height + 1);
  context.drawImage(cellPicture(grid, cells, spec.color), plot.left, plot.top, plot.width, plot.height);

  context.font = font;
  context.fillStyle = variable("--faint");
  context.textBaseline = "middle";
  context.textAlign = "right";
  if (names) {
    const every = Math.ceil(13 / cell);
    for (let row = 0; row < grid.rows; row += every) context.fillText(names[row], plot.left - 6, plot.top + (row + 0.5) * cell);
  } else {
    for (const mark of marks(0, grid.total_rows - 1, 6)) {
      const y = plot.top + (mark + 0.5) / (grid.rows * grid.row_span) * plot.height;
      context.fillText(String(mark), plot.left - 6, y);
    }
    context.save();
    context.translate(12, plot.top + plot.height / 2);
    context.rotate(-Math.PI / 2);
    context.textAlign = "center";
    context.fillText(spec.rowName, 0, 0);
    context.restore();
  }
  context.textBaseline = "top";
  context.textAlign = "center";
  for (const mark of marks(spec.firstColumn, grid.total_columns - 1 + spec.firstColumn, width < 480 ? 4 : 8)) {
    const x = plot.left + (mark - spec.firstColumn + 0.5) / (grid.columns * grid.column_span) * plot.width;
    context.fillText(String(mark), x, plot.top + plot.height + 5);
  }
  context.fillText(spec.columnName, plot.left + plot.width / 2, plot.top + plot.height + 22);

  const say = (row, column) => {
    const code = cells[row * grid.columns + column];
    const share = (code - 1) / 254;
    host.readout.textContent = spec.describe(row, column, code === 0 ? null : spec.value(share));
  };
  canvas.onpointermove = (event) => {
    const bounds = canvas.getBoundingClientRect();
    const column = Math.floor((event.clientX - bounds.left - plot.left) / plot.width * grid.columns);
    const row = Math.floor((event.clientY - bounds.top - plot.top) / plot.height * grid.rows);
    if (row >= 0 && row < grid.rows && column >= 0 && column < grid.columns) {
      host.place = [row, column];
      say(row, column);
    }
  };
  canvas.onpointerdown = canvas.onpointermove;
  canvas.onkeydown = (event) => {
    const step = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
    if (!step) return;
    event.preventDefault();
    const from = host.place || [0, -1];
    const clamp = (value, most) => Math.min(Math.max(value, 0), most - 1);
    host.place = [clamp(from[0] + step[0], grid.rows), clamp(from[1] + step[1], grid.columns)];
    say(...host.place);
  };
}

function cellPicture(grid, cells, color) {
  const picture = make("canvas", { width: grid.columns, height: grid.rows });
  const context = picture.getContext("2d");
  const image = context.createImageData(grid.columns, grid.rows);
  const colors = Array.from({ length: 256 }, (_, code) => color((code - 1) / 254));
  for (let place = 0; place < cells.length; place++) {
    if (cells[place] === 0) continue;
    image.data.set(colors[cells[place]], 4 * place);
    image.data[4 * place + 3] = 255;
  }
  context.putImageData(image, 0, 0);
  return picture;
}

// Round numbers from low to high, about so many.
function marks(low, high, count) {
  if (high <= low) return [low];
  const rough = (high - low) / count;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = Math.max(1, [1, 2, 5, 10].map((factor) => factor * power).find((each) => each >= rough));
  const found = [];
  for (let mark = Math.ceil(low / step) * step; mark <= high; mark += step) found.push(mark);
  return found;
}

function spanText(place, span, total, first) {
  const from = place * span + first;
  const to = Math.min((place + 1) * span, total) - 1 + first;
  return from === to ? String(from) : `${from}–${to}`;
}

function scaleBar(color, low, middle, high) {
  const stops = [0, 0.25, 0.5, 0.75, 1].map((share) => `rgb(${color(share).join(" ")})`);
  const bar = make("i", { "aria-hidden": "true" });
  bar.style.background = `linear-gradient(to right, ${stops.join(", ")})`;
  return [make("span", {}, low), bar, make("span", {}, high), make("span", {}, middle)];
}
