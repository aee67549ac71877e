// How the data is spread: classes over clients, and the sizes in numbers.

page.sections.push({
  id: "data-spread",
  title: "Data distribution",
  short: "Data",
  build(host) {
    host.append(make("div", { class: "panels" }));
  },
  draw(host) {
    const panels = host.querySelector(".panels");
    const wanted = JSON.stringify(page.data.data.map((panel) => panel.title));
    if (panels.dataset.wanted !== wanted) {
      panels.dataset.wanted = wanted;
      panels.replaceChildren(...page.data.data.map((panel) => make("div", { class: "panel" },
        make("h3", {}, panel.title), make("div", { class: "body" }))));
      if (!page.data.data.length) panels.append(make("p", { class: "missing" }, "The page was written without looking at the data."));
    }
    page.data.data.forEach((panel, place) => drawPanel(panels.children[place].querySelector(".body"), panel));
  },
});

function drawPanel(body, panel) {
  if (panel.problem) {
    body.replaceChildren(make("p", { class: "missing" }, `Not shown: ${panel.problem}.`));
    return;
  }
  const { grid, statistics } = panel;
  if (!body.chart) {
    body.chart = make("div", { class: "chart data-chart" });
    body.scale = make("div", { class: "scale" });
    body.facts = make("ul", { class: "facts" });
    body.replaceChildren(body.facts, make("figure", {}, body.chart, body.scale));
  }
  const facts = [
    ["clients", statistics.clients], ["classes", statistics.classes], ["samples", statistics.samples],
    ["samples per client", `${statistics.mean.toFixed(1)} ± ${statistics.std.toFixed(1)} (${statistics.smallest} to ${statistics.largest})`],
    ["classes per client", `${statistics.mean_classes.toFixed(1)} (${statistics.fewest_classes} to ${statistics.most_classes})`],
    ["training / test", `${statistics.train} / ${statistics.test}`],
  ];
  if (statistics.validation) facts.push(["kept by the server", statistics.validation]);
  body.facts.replaceChildren(...facts.map(([name, value]) => make("li", {}, `${name} `, make("b", {}, String(value)))));
  heatMap(body.chart, grid, {
    label: `Samples of ${grid.total_rows} classes on ${grid.total_columns} clients`,
    color: sequential, value: (share) => grid.low + share * (grid.high - grid.low), rowNames: panel.classes, rowName: "class", columnName: "client", firstColumn: 0,
    describe: (row, column, value) => {
      const who = `client ${spanText(column, grid.column_span, grid.total_columns, 0)}, class ${panel.classes[row]}`;
      return value === null ? `${who}: no samples` : `${who}: ${Math.round(10 ** value)} samples${grid.column_span > 1 ? " on average" : ""}`;
    },
  });
  body.scale.replaceChildren(...scaleBar(sequential, formatNumber(Number((10 ** grid.low).toPrecision(2))), "on a logarithmic scale", `${Math.round(10 ** grid.high)} samples`));
}
