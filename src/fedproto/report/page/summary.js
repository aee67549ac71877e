// The summary table: what matters first, all columns on demand; a click on a heading sorts by it.

function summaryColumns(all) {
  const { data, metric } = page;
  const loss = metricNamed(data.loss);
  const of = (key, unit, label, title = null) => ({
    key, label: label + (unit.percent ? " %" : ""), title, lower: unit.lower,
    value: (group) => figure(group, key)?.mean ?? null, text: (group) => withDeviation(unit, figure(group, key)),
  });
  const simple = (key, label, value, text) => ({ key, label, value, text, lower: true });
  const columns = [simple("title", "run", (group) => group.title, null), of(metric.name, metric, metric.label)];
  if (data.methods.length > 1) columns.push({
    key: "difference", label: `against ${data.methods[page.base].title}`, lower: metric.lower,
    value: (group) => own(group)?.mean ?? null, text: (group) => { const found = own(group); return found ? `${signed(metric, found.mean)} ${found.word}` : "–"; },
  });
  if (metric.name !== data.loss) columns.push(of(data.loss, loss, loss.label));
  if (metric.name === data.metric) columns.push(of("area", metric, "area"));
  if (data.target !== null && metric.name === data.metric) columns.push({ ...of("rounds to target", { percent: false, lower: true }, `rounds to ${formatNumber(data.target)}`), text: (group) => { const found = figure(group, "rounds to target"); return found ? Math.round(found.mean) + (found.deviation === null ? "" : ` ± ${Math.round(found.deviation)}`) : "–"; } });
  const total = (key, factor, label, format) => simple(key, label, (group) => figure(group, key)?.mean ?? null, (group) => { const found = figure(group, key); return found ? format(found.mean * factor) : "–"; });
  const both = (group) => { const [up, down] = [figure(group, "bytes up"), figure(group, "bytes down")]; return up && down ? 1e-6 * (up.mean + down.mean) : null; };
  columns.push(
    simple("seeds", "seeds", (group) => group.seeds.length, (group) => String(group.seeds.length)),
    simple("rounds", "rounds", (group) => group.rounds, (group) => (group.rounds < group.planned ? `${group.rounds} of ${group.planned}` : String(group.rounds))),
    simple("megabytes", "MB", both, (group) => { const found = both(group); return found === null ? "–" : found.toFixed(1); }),
    total("seconds", 1, "time", formatSeconds));
  if (!all) return columns;
  if (data.groups.some((group) => group.fairness)) columns.push({ key: "worst", label: "worst tenth of clients %", lower: false, value: (group) => group.fairness?.worst ?? null, text: (group) => (group.fairness ? (100 * group.fairness.worst).toFixed(1) : "–") });
  for (const other of data.metrics) if (!columns.some((column) => column.key === other.name)) columns.push(of(other.name, other, other.label));
  columns.push(total("bytes up", 1e-6, "MB up", (value) => value.toFixed(1)), total("bytes down", 1e-6, "MB down", (value) => value.toFixed(1)));
  return columns;
}

// Pooled training stands beside several conditions; only one of them can be in a row.
function own(group) {
  return group.conditions.length === 1 ? verdictOf(group, group.conditions[0]) : null;
}

function sortedGroups(columns) {
  const [key, down] = page.state.sort.split(":");
  const column = columns.find((one) => one.key === key);
  if (!column) return page.shown;
  return [...page.shown].sort((one, other) => {
    const [a, b] = [column.value(one), column.value(other)];
    if (a === null || b === null) return (a === null) - (b === null);
    return (typeof a === "string" ? a.localeCompare(b) : a - b) * (down ? -1 : 1);
  });
}

page.sections.push({
  id: "summary",
  title: "Summary",
  build(host) {
    host.append(
      make("p", { class: "hint" }, `Scores and losses are means over the last ${Math.round(100 * page.data.window)} % of the rounds; ` +
        "± is the sample standard deviation over seeds; area is the mean of the whole curve; MB up and down together."),
      make("div", { class: "controls" }, switcher("columns", "all columns", "columns")),
      scrolling("summary-scroll", "Summary table", make("table", { id: "summary-table" })));
    host.querySelector("#summary-scroll").classList.add("tall");
  },
  rows() {
    const columns = summaryColumns(true);
    return [["method", "condition", "seed", ...columns.slice(1).map((column) => column.label)], ...page.shown.map((group) => [
      methodTitle(group), group.conditions.map((index) => page.data.conditions[index].title).join("; "), group.seeds.join(" "),
      ...columns.slice(1).map((column) => column.value(group))])];
  },
  draw(host) {
    const columns = summaryColumns(page.state.columns);
    const table = host.querySelector("table");
    const focused = table.contains(document.activeElement) ? document.activeElement.dataset.key : null;
    const [key, down] = page.state.sort.split(":");
    host.querySelector("#columns").checked = page.state.columns;
    const heads = columns.map((column) => make("th", { scope: "col", "aria-sort": key === column.key ? (down ? "descending" : "ascending") : "none" }, make("button", {
      type: "button", "data-key": column.key,
      onclick: () => change({ sort: key === column.key ? `${key}${down ? "" : ":down"}` : `${column.key}${column.lower ? "" : ":down"}` }),
    }, column.label)));
    const rows = sortedGroups(columns).map((group) => columns.map((column) => (column.key === "title" ? [swatch(group.method), " ", group.title] : column.text(group))));
    table.replaceChildren(...tableOf(heads, rows).children);
    if (focused) [...table.querySelectorAll("button")].find((button) => button.dataset.key === focused)?.focus();
  },
});
