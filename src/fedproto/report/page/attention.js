// How much each client counted in each round, against counting alike.

function timesUniform(value) {
  return `${formatNumber(Number((2 ** value).toPrecision(3)))} ×`;
}

page.sections.push({
  id: "attention",
  title: "Attention over clients and rounds",
  short: "Attention",
  build(host) {
    host.append(
      make("p", { class: "hint" }, "The weight of a client's update in the average, in multiples of a uniform share: 1 × means that it counted like every other client of its cohort. Empty: the client did not take part."),
      make("div", { class: "controls" }, make("label", {}, "Run ", make("select", { id: "attention-run", onchange: (event) => { page.state.attentionRun = event.target.value; this.draw(host); } }))),
      make("figure", {}, make("div", { class: "chart", id: "attention-chart" }), make("div", { class: "scale" }), make("figcaption", {})));
  },
  draw(host) {
    const runs = page.data.runs.filter((run) => run.attention);
    const chart = host.querySelector("#attention-chart");
    host.querySelector(".controls").hidden = runs.length === 0;
    if (!runs.length) {
      chart.replaceChildren(make("p", { class: "missing" }, "No round so far averaged the updates of two or more clients."));
      chart.canvas = null;
      return;
    }
    const preferred = runs.find((run) => /proto/i.test(page.data.groups[run.group].title)) || runs[0];
    if (!runs.some((run) => run.path === page.state.attentionRun)) page.state.attentionRun = preferred.path;
    syncOptions(host.querySelector("select"), runs.map((run) => [run.path, runTitle(run)]), page.state.attentionRun);
    const run = runs.find((one) => one.path === page.state.attentionRun);
    const grid = run.attention;
    heatMap(chart, grid, {
      label: `Attention of ${grid.total_rows} clients over ${grid.total_columns} rounds, ${runTitle(run)}`,
      color: diverging, value: (share) => grid.high * (2 * share - 1) * Math.abs(2 * share - 1), rowName: "client", columnName: "round", firstColumn: 1,
      describe: (row, column, value) => {
        const who = `client ${spanText(row, grid.row_span, grid.total_rows, 0)}, round ${spanText(column, grid.column_span, grid.total_columns, 1)}`;
        return value === null ? `${who}: did not take part` : `${who}: ${timesUniform(value)} the uniform share`;
      },
    });
    host.querySelector(".scale").replaceChildren(...scaleBar(diverging, timesUniform(grid.low), "middle: 1 ×, the uniform share", timesUniform(grid.high)));
    const joined = [
      grid.row_span > 1 ? `${grid.row_span} neighbouring clients` : null,
      grid.column_span > 1 ? `${grid.column_span} rounds` : null,
    ].filter(Boolean).join(" and ");
    host.querySelector("figcaption").textContent = joined ? `Each cell is the (geometric) mean over ${joined}.` : "";
  },
});
