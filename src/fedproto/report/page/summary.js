// The summary table; a click on a heading sorts by it.

function summaryColumns() {
  const data = page.data;
  const main = metricNamed(data.metric);
  const score = (key, metric, label, digits = null) => ({
    key, label: label + (metric.percent ? " %" : ""), lower: metric.lower, best: true,
    value: (group) => (group.values[key] ? group.values[key][0] : null),
    text: (group) => meanAndSpread(group.values[key], group.seeds.length, metric.percent, digits),
  });
  const plain = (key, label, value, text) => ({ key, label, value, text, lower: false, best: false });
  const columns = [
    plain("title", "run", (group) => group.title, null),
    score(data.metric, main, main.label),
    score("loss", { percent: false, lower: true }, "loss"),
    score("area", main, "area"),
  ];
  if (data.target !== null) columns.push(score("rounds to target", { percent: false, lower: true }, `rounds to ${formatNumber(data.target)}`, 0));
  if (data.groups.some((group) => group.fairness)) {
    columns.push({
      key: "worst", label: "worst 10 % of clients %", lower: false, best: true,
      value: (group) => (group.fairness ? group.fairness.worst : null),
      text: (group) => (group.fairness ? (100 * group.fairness.worst).toFixed(1) : "–"),
    });
  }
  for (const metric of data.metrics) {
    const known = [data.metric, "loss", "validation_loss"].includes(metric.name) || metric.name.startsWith("iou_");
    if (!known) columns.push({ ...score(metric.name, metric, metric.label), best: false });
  }
  const total = (key, factor, label, format) => plain(key, label,
    (group) => (group.values[key] ? group.values[key][0] : null),
    (group) => (group.values[key] ? format(group.values[key][0] * factor) : "–"));
  columns.push(
    plain("seeds", "seeds", (group) => group.seeds.length, (group) => String(group.seeds.length)),
    plain("rounds", "rounds", (group) => group.rounds, (group) => (group.rounds < group.planned ? `${group.rounds} of ${group.planned}` : String(group.rounds))));
  columns.push(
    total("bytes up", 1e-6, "MB up", (value) => value.toFixed(1)),
    total("bytes down", 1e-6, "MB down", (value) => value.toFixed(1)),
    total("seconds", 1, "time", formatSeconds));
  return columns;
}

function meanAndSpread(pair, seeds, percent, digits) {
  if (!pair) return "–";
  const [mean, spread] = percent ? pair.map((value) => 100 * value) : pair;
  const size = Math.abs(mean);
  const tiny = size !== 0 && size < 0.01;
  const show = (value) => (tiny ? formatNumber(value) : value.toFixed(digits ?? (percent || size >= 100 ? 1 : 3)));
  return show(mean) + (seeds > 1 ? ` ± ${show(spread)}` : "");
}

function sortedGroups(columns) {
  const groups = page.data.groups.map((group, place) => ({ ...group, place }));
  const sort = page.state.sort;
  const column = sort && columns.find((one) => one.key === sort.key);
  if (!column) return groups;
  const order = (one, other) => {
    const [a, b] = [column.value(one), column.value(other)];
    if (a === null || b === null) return (a === null) - (b === null);
    return (typeof a === "string" ? a.localeCompare(b) : a - b) * (sort.down ? -1 : 1);
  };
  return groups.sort(order);
}

page.sections.push({
  id: "summary",
  title: "Summary",
  build(host) {
    host.append(
      make("p", { class: "hint" }, `Scores and losses are means over the last ${Math.round(100 * page.data.window)} % of the rounds; ` +
        "± is the standard deviation over seeds; area is the mean of the whole curve. Bold: the best of a column."),
      make("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Summary table" }, make("table", { id: "summary-table" })),
    );
  },
  draw(host) {
    const columns = summaryColumns();
    const table = host.querySelector("table");
    const focused = table.contains(document.activeElement) ? document.activeElement.dataset.key : null;
    const sort = page.state.sort;
    const best = new Map(columns.filter((column) => column.best).map((column) => {
      const values = page.data.groups.map(column.value).filter((value) => value !== null);
      return [column.key, values.length < 2 ? null : column.lower ? Math.min(...values) : Math.max(...values)];
    }));
    const head = columns.map((column) => make("th", {
      scope: "col", "aria-sort": sort && sort.key === column.key ? (sort.down ? "descending" : "ascending") : "none",
    }, make("button", {
      type: "button", "data-key": column.key,
      onclick: () => {
        const again = page.state.sort && page.state.sort.key === column.key;
        page.state.sort = { key: column.key, down: again ? !page.state.sort.down : !(column.lower || column.key === "title") };
        this.draw(host);
      },
    }, column.label)));
    const rows = sortedGroups(columns).map((group) => make("tr", {}, columns.map((column) =>
      column.key === "title"
        ? make("th", { scope: "row" }, swatch(group.place), " ", group.title)
        : make("td", { class: best.get(column.key) !== undefined && best.get(column.key) !== null && column.value(group) === best.get(column.key) ? "best" : null }, column.text(group)))));
    table.replaceChildren(make("thead", {}, make("tr", {}, head)), make("tbody", {}, rows));
    if (focused) [...table.querySelectorAll("button")].find((button) => button.dataset.key === focused)?.focus();
  },
});
