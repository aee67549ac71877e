// How fair the final model is: its score client by client, and class by class.

const SHAPES = [
  (x, y) => `M${x - 5},${y}a5,5 0 1,0 10,0a5,5 0 1,0 -10,0`,
  (x, y) => `M${x - 4.5},${y - 4.5}h9v9h-9z`,
  (x, y) => `M${x},${y - 6}l6,10h-12z`,
  (x, y) => `M${x},${y - 6}l6,6l-6,6l-6,-6z`,
  (x, y) => `M${x},${y + 6}l6,-10h-12z`,
];

function markOf(group, x, y) {
  return makeSvg("path", { d: SHAPES[group % SHAPES.length](x, y), fill: colorOf(group), stroke: variable("--paper"), "stroke-width": 1 });
}

function quantile(fairness, share) {
  return fairness.quantiles[Math.round(share * (fairness.quantiles.length - 1))];
}

page.sections.push({
  id: "clients",
  title: "Fairness across clients",
  short: "Clients",
  build(host) {
    host.append(
      make("p", { class: "hint" }, "Each client's test samples under the final model, clients in order from worst to best. A flat, high line is a model that is good for everybody."),
      make("figure", {}, make("div", { class: "chart", id: "clients-chart", tabindex: 0, role: "group" })),
      make("div", { class: "scroll", id: "clients-table", tabindex: 0, role: "region", "aria-label": "Quantiles of the clients' scores" }),
      make("div", { class: "absent" }));
  },
  draw(host) {
    const all = page.data.groups.map((group, place) => ({ ...group, place }));
    const without = page.data.runs.filter((run) => !page.data.groups[run.group].fairness);
    host.querySelector(".absent").replaceChildren(...(without.length ? [missing(
      without.length === page.data.runs.length ? "The scores of single clients are not there yet." : `For ${without.length} of ${page.data.runs.length} runs the scores of single clients are not there yet.`,
      without.map((run) => run.path))] : []));
    const having = all.filter((group) => group.fairness);
    host.querySelector("figure").hidden = having.length === 0;
    host.querySelector("#clients-table").hidden = having.length === 0;
    host.querySelector(".hint").hidden = having.length === 0;
    if (!having.length) return;
    const count = having[0].fairness.quantiles.length;
    lineChart(host.querySelector("#clients-chart"), {
      key: "clients", share: true, label: "Score of clients from worst to best", height: 280,
      xs: Array.from({ length: count }, (_, place) => place / (count - 1)),
      series: having.filter((group) => isShown(group.place)).map((group) => ({ label: group.title, group: group.place, values: group.fairness.quantiles })),
      xName: "clients from worst to best", formatX: (value) => formatPercent(value, 0), format: (value) => formatPercent(value), formatMark: markAs({ percent: true }),
    });
    const heads = ["run", "clients", "mean", "std", "worst", "worst 10 % (mean)", "10 %", "25 %", "median", "75 %", "90 %", "best"];
    const rows = having.map(({ title, place, fairness }) => make("tr", {},
      make("th", { scope: "row" }, swatch(place), " ", title),
      make("td", {}, fairness.seeds > 1 ? `${fairness.clients} (${fairness.seeds} seeds)` : String(fairness.clients)),
      [fairness.mean, fairness.std, quantile(fairness, 0), fairness.worst, ...[0.1, 0.25, 0.5, 0.75, 0.9, 1].map((share) => quantile(fairness, share))]
        .map((value) => make("td", {}, formatPercent(value)))));
    host.querySelector("#clients-table").replaceChildren(make("table", {},
      make("thead", {}, make("tr", {}, heads.map((head) => make("th", { scope: "col" }, head)))), make("tbody", {}, rows)));
  },
});

page.sections.push({
  id: "classes",
  title: "Class by class",
  short: "Classes",
  build(host) {
    host.append(make("p", { class: "hint" }), make("div", { class: "chart", id: "classes-chart" }), make("div", { class: "absent" }));
  },
  draw(host) {
    const chart = host.querySelector("#classes-chart");
    const having = page.data.groups.map((group, place) => ({ ...group, place })).filter((group) => group.classes);
    const without = page.data.runs.filter((run) => !page.data.groups[run.group].classes);
    host.querySelector(".absent").replaceChildren(...(without.length ? [missing(
      having.length ? `For ${without.length} of ${page.data.runs.length} runs the scores of single classes are not there yet.` : "The scores of single classes are not there yet.",
      without.map((run) => run.path))] : []));
    host.querySelector(".hint").hidden = having.length === 0;
    chart.replaceChildren();
    if (!having.length) return;
    const overlap = page.data.metric.includes("iou") || having.some((group) => group.classes.source === "rounds");
    host.querySelector(".hint").textContent = overlap
      ? "Intersection over union of each class, on the test samples of all clients."
      : "Accuracy on the test samples of each class, of all clients together.";
    const names = [...new Set(having.flatMap((group) => Object.keys(group.classes.values)))];
    const shown = having.filter((group) => isShown(group.place));
    chart.append(make("ul", { class: "legend" }, shown.map((group) => make("li", {}, makeSvg("svg", { viewBox: "0 0 14 14", "aria-hidden": "true" }, markOf(group.place, 7, 7)), " ", group.title))));
    chart.append(dotPlot(names, shown, widthOf(chart)));
  },
});

function dotPlot(names, groups, width) {
  const left = Math.min(width * 0.35, 24 + 7 * Math.max(...names.map((name) => Math.min(name.length, 20))));
  const row = Math.max(20, names.length > 40 ? 16 : 22);
  const height = names.length * row + 34;
  const x = (value) => left + value * (width - left - 20);
  const svg = makeSvg("svg", { class: "dots", viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `Score of ${names.length} classes` });
  for (const share of [0, 0.25, 0.5, 0.75, 1]) {
    svg.append(makeSvg("line", { class: "grid", x1: x(share), x2: x(share), y1: 0, y2: names.length * row }));
    svg.append(makeSvg("text", { x: x(share), y: height - 12, "text-anchor": "middle" }, `${100 * share} %`));
  }
  names.forEach((name, place) => {
    const y = (place + 0.5) * row;
    const values = groups.filter((group) => name in group.classes.values);
    svg.append(makeSvg("line", { class: "grid", x1: left, x2: width - 20, y1: y, y2: y }));
    svg.append(makeSvg("text", { x: left - 8, y: y + 4, "text-anchor": "end" }, name.length > 20 ? `${name.slice(0, 19)}…` : name));
    for (const group of values) {
      const value = group.classes.values[name];
      const mark = markOf(group.place, x(value), y);
      mark.append(makeSvg("title", {}, `${name}, ${group.title}: ${formatPercent(value)}`));
      svg.append(mark);
    }
  });
  return svg;
}
