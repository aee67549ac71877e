// For whom: the score client by client, against what clients hold, and class by class.

const TO_ANALYSE = "fedproto report --analyse";
const TO_RECORD = 'fedproto report --analyse, or train with [measure] what = ["clients"]';

page.sections.push({
  id: "clients",
  title: "Fairness: for whom is it good?",
  short: "Clients",
  empty() {
    return page.data.groups.some((group) => group.fairness) ? null : ["Scores of single clients:", TO_RECORD];
  },
  build(host) {
    host.append(
      make("p", { class: "hint" }, "Each client's own test samples; clients in order from worst to best, all seeds together. A flat, high line is a model that is good for everybody."),
      make("div", { id: "clients-panels" }),
      make("div", { class: "controls" }, byChooser("clients-by")),
      make("div", { id: "held-panels" }),
      scrolling("clients-table", "Quantiles of the clients' scores"));
  },
  having() { return page.shown.filter((group) => group.fairness); },
  has(group) { return group.fairness; },
  holds(group) { return group.fairness?.[heldBy()].length; },
  quantiles(condition) {
    return {
      key: "clients", label: `Score of clients from worst to best, ${titleOf(condition)}`,
      lines: condition.groups.map((group) => ({
        label: methodTitle(group), method: group.method, y: group.fairness.quantiles, x: group.fairness.quantiles.map((_, index, all) => index / (all.length - 1)),
      })),
      x: { name: "clients, worst to best", mark: (value) => `${Math.round(100 * value)} %`, say: (value) => formatPercent(value, 0) },
      y: { name: "score of a client", share: true, mark: markAs({ percent: true }), say: formatPercent },
    };
  },
  held(condition) {
    return holdingSpec(condition, (group) => group.fairness, { name: "mean score of clients", share: true, mark: markAs({ percent: true }), say: formatPercent }, "Score");
  },
  drawings() { return [...allDrawings(this.has, this.quantiles, 220), ...allDrawings(this.holds, this.held, 220)]; },
  facts({ fairness }) {
    const at = (share) => fairness.quantiles[Math.round(share * (fairness.quantiles.length - 1))];
    return [fairness.mean, fairness.std, fairness.zero, at(0.1), at(0.25), at(0.5), at(0.75), at(0.9)];
  },
  heads: ["mean", "std", "at zero", "10 % below", "25 % below", "median", "75 % below", "90 % below"],
  rows() {
    return [["run", "clients", "seeds", "round", ...this.heads], ...this.having().map((group) => [group.title, group.fairness.clients, group.fairness.seeds, group.fairness.round, ...this.facts(group)])];
  },
  draw(host) {
    showSpecs(host.querySelector("#clients-panels"), this.has, this.quantiles, 220);
    host.querySelector("#clients-by").value = heldBy();
    host.querySelector(".controls").hidden = showSpecs(host.querySelector("#held-panels"), this.holds, this.held, 220) === 0;
    const table = host.querySelector("#clients-table");
    table.classList.add("tall");
    table.replaceChildren(tableOf(["run", "clients", ...this.heads], this.having().map((group) => [
      [swatch(group.method), " ", group.title],
      group.fairness.seeds > 1 ? `${group.fairness.clients} (${group.fairness.seeds} seeds)` : String(group.fairness.clients),
      ...this.facts(group).map((value) => formatPercent(value))])));
  },
});

page.sections.push({
  id: "classes",
  title: "Class by class",
  short: "Classes",
  empty() {
    return page.data.groups.some((group) => group.classes) ? null : ["Scores of single classes:", TO_RECORD];
  },
  build(host) {
    host.append(make("p", { class: "hint" }), make("div", { id: "classes-panels" }));
  },
  panels(all) {
    const { total, shown } = having((group) => group.classes, all);
    const drawings = shown.map((condition) => ({ title: titleOf(condition), draw: (width) => dotPlot([...new Set(condition.groups.flatMap((group) => Object.keys(group.classes)))], condition.groups, width) }));
    return { total, drawings };
  },
  rows() {
    return [["run", "class", "score"], ...page.shown.filter((group) => group.classes).flatMap((group) => Object.entries(group.classes).map(([name, value]) => [group.title, name, value]))];
  },
  drawings() { return forFile(this.panels(true).drawings); },
  draw(host) {
    const overlap = page.data.metric.includes("iou");
    const curves = page.data.metrics.some((metric) => metric.class);
    host.querySelector(".hint").textContent = (overlap
      ? "Intersection over union of each class, on the test samples of all clients."
      : "Accuracy on the test samples of each class, of all clients together.") + (curves ? " Their curves are among the metrics above." : "");
    const { total, drawings } = this.panels(false);
    showPanels(host.querySelector("#classes-panels"), drawings, total);
  },
});

function dotPlot(names, groups, width) {
  const left = Math.min(width * 0.35, 24 + 7 * Math.max(...names.map((name) => Math.min(name.length, 20))));
  const row = names.length > 25 ? 15 : 22;
  const height = names.length * row + 34;
  const x = (value) => left + value * (width - left - 20);
  const svg = svgOf(width, height, `Score of ${names.length} classes: ` + groups.map((group) => `${methodTitle(group)} ${names.filter((name) => name in group.classes).map((name) => `${name} ${formatPercent(group.classes[name], 0)}`).join(", ")}`).join("; "), { class: "dots" });
  for (const share of [0, 0.25, 0.5, 0.75, 1]) {
    svg.append(lineAt(x(share), 0, x(share), names.length * row), textAt(x(share), height - 14, `${100 * share} %`, { "text-anchor": "middle" }));
  }
  names.forEach((name, index) => {
    const y = (index + 0.5) * row;
    svg.append(lineAt(left, y, width - 20, y), textAt(left - 8, y + 4, shortened(name, 20), { "text-anchor": "end", fill: variable("--ink") }));
    for (const group of groups.filter((one) => name in one.classes)) {
      const mark = markOf(group.method, x(group.classes[name]), y);
      mark.append(makeSvg("title", {}, `${name}, ${methodTitle(group)}: ${formatPercent(group.classes[name])}`));
      svg.append(mark);
    }
  });
  return svg;
}
