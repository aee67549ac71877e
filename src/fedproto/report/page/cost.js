// Cost: the score against megabytes, and which methods are Pareto-optimal.

page.sections.push({
  id: "cost",
  title: "Cost",
  empty() {
    return page.data.runs.some((run) => run.megabytes.total > 0) && page.data.metrics.length ? null : ["No data was sent.", null];
  },
  build(host) {
    host.append(make("p", { class: "hint" }), make("div", { id: "cost-panels" }));
  },
  has(group) { return figureOf([group], page.metric.name) && megabytesOf([group], "bytes up", "bytes down") > 0; },
  spec(condition) {
    const { metric } = page;
    const points = condition.groups.map((group) => {
      const [score, cost] = [figureOf([group], metric.name).mean, megabytesOf([group], "bytes up", "bytes down")];
      return { label: methodTitle(group), method: group.method, x: cost, y: score, value: score, text: `${formatAs(metric)(score)} for ${formatNumber(cost)} MB` };
    });
    const better = (one, other) => (metric.lower ? one.y < other.y : one.y > other.y);
    for (const point of points) point.ring = !points.some((other) => other.x <= point.x && better(other, point));
    return {
      label: `${metric.label} against megabytes, ${titleOf(condition)}`, points,
      x: { name: "megabytes sent and received" }, y: { name: metric.label, mark: markAs(metric), say: formatAs(metric), share: metric.percent },
    };
  },
  rows() {
    return [["condition", "method", "megabytes", page.metric.name, "pareto_optimal"], ...having(this.has, true).shown.flatMap((condition) => this.spec(condition).points.map((point) => [titleOf(condition), point.label, point.x, point.y, Boolean(point.ring)]))];
  },
  draw(host) {
    host.querySelector(".hint").textContent = `${page.metric.label} at the end against the megabytes sent and received until then. Ringed: Pareto-optimal, no cheaper method scores as high.`;
    showSpecs(host.querySelector("#cost-panels"), this.has, this.spec, 220);
  },
});
