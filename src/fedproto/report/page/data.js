// Distribution of the data: classes over clients, and sizes.

page.sections.push({
  id: "data-spread",
  title: "Data distribution",
  short: "Data",
  empty() {
    return page.data.data.length ? null : ["Needs", "fedproto report without --no-data"];
  },
  build(host) {
    host.append(...page.data.data.map((panel) => {
      const body = make("div", { class: "body" });
      return make("details", { class: "spread", open: page.data.data.length === 1, ontoggle: (event) => { if (event.target.open) drawSpread(body, panel); } },
        make("summary", {}, shortSpread(panel)), body);
    }));
  },
  rows() {
    return [["data", "clients", "classes", "samples", "mean_per_client", "std", "smallest", "largest", "mean_classes", "train", "test", "test_set"],
      ...page.data.data.filter((panel) => panel.statistics).map(({ statistics: one, ...panel }) => [spreadTitle(panel), one.clients, one.classes, one.samples, one.mean, one.std, one.smallest, one.largest, one.mean_classes, one.train, one.test, one.test_set])];
  },
  draw(host) {
    host.querySelectorAll(".spread").forEach((spread, index) => { if (spread.open) drawSpread(spread.lastChild, page.data.data[index]); });
  },
});

// The data set with the options that tell it apart from others of its name.
function spreadTitle({ name, options }) {
  const others = page.data.data.filter((panel) => panel.name === name);
  const differ = Object.entries(options).filter(([option, value]) => others.some((panel) => valueText(panel.options[option]) !== valueText(value)));
  return name + (differ.length ? ` (${differ.map(([option, value]) => `${option} = ${valueText(value)}`).join(", ")})` : "");
}

function shortSpread(panel) {
  const { statistics, problem } = panel;
  const title = spreadTitle(panel);
  if (problem) return `${title}: not shown, ${problem}`;
  return `${title}: ${statistics.clients} clients, ${statistics.samples} samples, ${statistics.mean_classes.toFixed(1)} of ${statistics.classes} classes a client`;
}

const CIVIDIS = [[0, 34, 78], [65, 77, 107], [124, 123, 120], [188, 175, 111], [254, 232, 56]];

// Much stands out from the background: dark on light, bright on dark.
function sequential(share) {
  return between(CIVIDIS, isDark() ? 0.15 + 0.85 * share : 1 - share);
}

// Samples of each class on each client as shades; many clients are joined.
function classMap({ grid, classes }, width) {
  const names = classes.map((name) => shortened(name, 16));
  const left = Math.min(140, 32 + 7 * Math.max(...names.map((name) => name.length)));
  const cell = Math.min(18, Math.max(3, Math.floor(380 / grid.rows)));
  const [right, below] = [width - 14, 6 + grid.rows * cell];
  const svg = svgOf(width, below + 84, `Samples of ${grid.rows} classes on ${grid.total_columns} clients`);
  const x = scaleOf([-0.5, grid.columns * grid.column_span - 0.5], [left, right], false);
  const scale = scaleOf([grid.low, grid.high], [left, left + Math.min(320, right - left)], false);
  svg.append(makeSvg("image", { href: cellPicture(grid), x: left, y: 6, width: right - left, height: below - 6, preserveAspectRatio: "none", style: "image-rendering: pixelated" }),
    makeSvg("rect", { x: left, y: 6, width: right - left, height: below - 6, fill: "none", stroke: variable("--line") }),
    textAt(0, 0, "class", { "text-anchor": "middle", transform: `translate(12 ${below / 2}) rotate(-90)` }), textAt((left + right) / 2, below + 32, "client", { "text-anchor": "middle" }));
  for (let row = 0; row < grid.rows; row += Math.ceil(13 / cell)) svg.append(textAt(left - 6, 6 + (row + 0.5) * cell + 4, names[row], { "text-anchor": "end" }));
  for (const mark of marks(0, grid.total_columns - 1, width < 480 ? 4 : 8, true)) svg.append(textAt(x(mark), below + 16, String(mark), { "text-anchor": "middle" }));
  for (let step = 0; step < 32; step++) svg.append(makeSvg("rect", { x: left + step * (scale(grid.high) - left) / 32, y: below + 46, width: (scale(grid.high) - left) / 32 + 0.5, height: 10, fill: `rgb(${sequential((step + 0.5) / 32).join(",")})` }));
  for (const mark of logMarks(10 ** grid.low, 10 ** grid.high, 10)) svg.append(textAt(scale(Math.log10(mark)), below + 70, formatNumber(mark), { "text-anchor": "middle" }));
  svg.append(textAt(scale(grid.high) + 14, below + 56, grid.column_span > 1 ? `samples, mean of ${grid.column_span} clients` : "samples"));
  return svg;
}

function cellPicture(grid) {
  const cells = bytesOf(grid.cells);
  const picture = make("canvas", { width: grid.columns, height: grid.rows });
  const context = picture.getContext("2d");
  const image = context.createImageData(grid.columns, grid.rows);
  for (let index = 0; index < cells.length; index++) if (cells[index]) image.data.set([...sequential((cells[index] - 1) / 254), 255], 4 * index);
  context.putImageData(image, 0, 0);
  return picture.toDataURL();
}

function drawSpread(body, panel) {
  if (panel.problem) return;
  const { statistics } = panel;
  if (!body.map) {
    body.map = make("div", { class: "chart data-chart" });
    body.facts = make("ul", { class: "facts" });
    const options = Object.entries(panel.options).map(([option, value]) => `${option} = ${valueText(value)}`).join(", ");
    body.replaceChildren(body.facts, make("p", { class: "hint" }, options), body.map);
  }
  const facts = [
    ["clients", statistics.clients], ["classes", statistics.classes], ["samples", statistics.samples],
    ["samples per client", `${statistics.mean.toFixed(1)} ± ${statistics.std.toFixed(1)} (${statistics.smallest} to ${statistics.largest})`],
    ["classes per client", `${statistics.mean_classes.toFixed(1)} (${statistics.fewest_classes} to ${statistics.most_classes})`],
    ["training / test", `${statistics.train} / ${statistics.test}`],
  ];
  if (statistics.validation) facts.push(["validation, on the server", statistics.validation]);
  body.facts.replaceChildren(...facts.map(([name, value]) => make("li", {}, `${name} `, make("b", {}, String(value)))));
  body.map.replaceChildren(classMap(panel, widthOf(body.map)));
}
