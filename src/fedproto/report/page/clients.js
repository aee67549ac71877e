// Scores per client, against the clients' samples and classes, and per class.

const TO_ANALYSE = "fedproto analyse";
const TO_RECORD = 'fedproto analyse, or train with [measure] what = ["clients"]';

page.sections.push({
  id: "clients",
  title: "Scores per client",
  short: "Clients",
  empty() {
    return page.data.groups.some((group) => group.fairness) ? null : ["Needs", TO_RECORD];
  },
  build(host) {
    host.append(
      make("p", { class: "hint" }, "Score on each client's own test samples; clients sorted from worst to best, all seeds together."),
      make("div", { id: "clients-panels" }),
      make("div", { class: "controls" }, byChooser("clients-by")),
      make("div", { id: "held-panels" }));
  },
  has(group) { return group.fairness; },
  holds(group) { return group.fairness?.[heldBy()].length; },
  quantiles(condition) {
    return {
      label: `Score of clients from worst to best, ${titleOf(condition)}`,
      lines: withGrey(condition.family, condition.groups, page.metric.name).map(([group, grey]) => ({
        label: methodTitle(group), named: !grey.color, method: group.method, ...grey, y: group.fairness.quantiles, x: group.fairness.quantiles.map((_, index, all) => index / (all.length - 1)),
      })),
      x: { name: "clients, worst to best", mark: (value) => `${Math.round(100 * value)} %`, say: (value) => formatPercent(value, 0) },
      y: { name: "score of a client", share: true, mark: markAs({ percent: true }), say: formatPercent },
    };
  },
  held(condition) {
    return holdingSpec(condition, (group) => group.fairness, { name: "mean score of clients", share: true, mark: markAs({ percent: true }), say: formatPercent }, "Score");
  },
  rows() {
    const shares = [0.1, 0.25, 0.5, 0.75, 0.9];
    return [["run", "clients", "seeds", "round", "mean", "worst_tenth", "at_zero", ...shares.map((share) => `quantile_${share}`)], ...page.shown.filter((group) => group.fairness).map(({ title, fairness }) => [
      title, fairness.clients, fairness.seeds, fairness.round, fairness.mean, fairness.worst, fairness.zero, ...shares.map((share) => fairness.quantiles[Math.round(share * (fairness.quantiles.length - 1))])])];
  },
  draw(host) {
    showSpecs(host.querySelector("#clients-panels"), this.has, this.quantiles, 220);
    host.querySelector("#clients-by").value = heldBy();
    host.querySelector(".controls").hidden = showSpecs(host.querySelector("#held-panels"), this.holds, this.held, 220) === 0;
  },
});

page.sections.push({
  id: "classes",
  title: "Scores per class",
  short: "Classes",
  empty() {
    return page.data.groups.some((group) => group.classes) ? null : ["Needs", TO_RECORD];
  },
  build(host) {
    host.append(make("p", { class: "hint" }), scrolling("classes-table", "Score of each class"));
  },
  rows() {
    return [["run", "class", "score"], ...page.shown.filter((group) => group.classes).flatMap((group) => Object.entries(group.classes).map(([name, value]) => [group.title, name, value]))];
  },
  draw(host) {
    const overlap = page.data.metric.includes("iou");
    const curves = page.data.metrics.some((metric) => metric.class);
    host.querySelector(".hint").textContent = (overlap
      ? "Intersection over union of each class, on the test samples of all clients."
      : "Accuracy on the test samples of each class, of all clients together.") + (curves ? " Their curves are among the metrics of Curves." : "");
    const groups = page.shown.filter((group) => group.classes);
    const names = [...new Set(groups.flatMap((group) => Object.keys(group.classes)))];
    if (!names.length) host.querySelector(".hint").textContent = `None of the runs in view has them. To get them: ${TO_RECORD}.`;
    host.querySelector("#classes-table").replaceChildren(names.length ? tableOf(["run", ...names], groups.map((group) => [[swatch(group.method), " ", group.title], ...names.map((name) => formatPercent(group.classes[name]))])) : "");
  },
});
