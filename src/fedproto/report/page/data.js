// How the data is spread: classes over clients, and the sizes in numbers.

page.sections.push({
  id: "data-spread",
  title: "Data distribution",
  short: "Data",
  empty() {
    return page.data.data.length ? null : ["How the data is spread:", "fedproto report without --no-data"];
  },
  build(host) {
    host.append(make("div", { class: "spreads" }));
  },
  legend: false,
  rows() {
    return [["data", "clients", "classes", "samples", "mean_per_client", "std", "smallest", "largest", "mean_classes", "train", "test", "test_set"],
      ...page.data.data.filter((panel) => panel.statistics).map(({ statistics: one, ...panel }) => [spreadTitle(panel), one.clients, one.classes, one.samples, one.mean, one.std, one.smallest, one.largest, one.mean_classes, one.train, one.test, one.test_set])];
  },
  drawings() {
    return page.data.data.filter((panel) => panel.grid).map((panel) => ({ title: spreadTitle(panel), draw: (width) => heatDrawing(panel.grid, dataSpec(panel), width) }));
  },
  draw(host) {
    const spreads = host.querySelector(".spreads");
    const wanted = JSON.stringify(page.data.data.map(spreadTitle));
    if (spreads.dataset.wanted !== wanted) {
      spreads.dataset.wanted = wanted;
      spreads.replaceChildren(...page.data.data.map((panel, index) => {
        const body = make("div", { class: "body" });
        return make("details", { open: page.data.data.length === 1 || undefined, "data-index": index, ontoggle: (event) => { if (event.target.open) drawSpread(body, panel); } },
          make("summary", {}, shortSpread(panel)), body);
      }));
    }
    for (const panel of spreads.children) if (panel.open) drawSpread(panel.lastChild, page.data.data[Number(panel.dataset.index)]);
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

function dataSpec(panel) {
  const { grid } = panel;
  const ticks = [];
  for (const mark of logMarks(10 ** grid.low, 10 ** grid.high, 10)) ticks.push([(Math.log10(mark) - grid.low) / (grid.high - grid.low), formatNumber(mark)]);
  return {
    label: `Samples of ${grid.total_rows} classes on ${grid.total_columns} clients`, color: sequential, ticks, scaleName: "samples",
    rowNames: panel.classes, rowName: "class", columnName: "client", firstColumn: 0,
    describe: (row, column, share) => {
      const who = `client ${spanText(column, grid.column_span, grid.total_columns, 0)}, class ${panel.classes[row]}`;
      return share === null ? `${who}: no samples` : `${who}: ${Math.round(10 ** (grid.low + share * (grid.high - grid.low)))} samples${grid.column_span > 1 ? " on average" : ""}`;
    },
  };
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
  if (statistics.validation) facts.push(["kept by the server", statistics.validation]);
  body.facts.replaceChildren(...facts.map(([name, value]) => make("li", {}, `${name} `, make("b", {}, String(value)))));
  heatMap(body.map, panel.grid, dataSpec(panel));
}
