// What was computed from final checkpoints: calibration, features in the plane, maps.

page.sections.push({
  id: "calibration",
  title: "Calibration",
  build(host) {
    host.append(
      make("p", { class: "hint" }, "Of the samples a model is so sure about, how many does it get right? On the diagonal confidence and accuracy agree; below it the model is too sure of itself."),
      make("figure", {}, make("div", { class: "chart", id: "calibration-chart", tabindex: 0, role: "group" }), make("figcaption", {})),
      make("div", { class: "absent" }));
  },
  draw(host) {
    const having = page.data.runs.filter((run) => run.calibration);
    host.querySelector(".hint").hidden = having.length === 0;
    host.querySelector("figure").hidden = having.length === 0;
    host.querySelector(".absent").replaceChildren(...(having.length ? [] : [missing("There is no reliability diagram yet.", page.data.runs.map((run) => run.path))]));
    if (!having.length) return;
    const first = having.filter((run, place) => having.findIndex((one) => one.group === run.group) === place);
    const lines = first.filter((run) => isShown(run.group)).map((run) => ({
      label: `${runTitle(run)} (ECE ${formatPercent(run.calibration.ece)})`, group: run.group,
      x: run.calibration.bins.map((bin) => bin.confidence), y: run.calibration.bins.map((bin) => bin.accuracy),
    }));
    const { xs, spread } = aligned([{ x: [0, 1] }, ...lines]);
    const series = lines.map((one) => ({ label: one.label, group: one.group, values: spread(one.x, one.y) }));
    series.push({ label: "agreement", color: variable("--faint"), dash: [4, 4], thin: true, values: spread([0, 1], [0, 1]) });
    lineChart(host.querySelector("#calibration-chart"), {
      key: "calibration", label: "Accuracy over confidence", height: 300, xs, series, range: [0, 1], xName: "confidence",
      formatX: (value) => formatPercent(value, 0), format: (value) => formatPercent(value, 0),
    });
    host.querySelector("figcaption").textContent = "Expected calibration error: " +
      first.map((run) => `${runTitle(run)} ${formatPercent(run.calibration.ece)}`).join("; ") + ".";
  },
});

page.sections.push({
  id: "embedding",
  title: "Features in the plane",
  short: "Features",
  build(host) {
    host.append(
      make("p", { class: "hint" }, "Features of test samples under the final model, brought into the plane by t-SNE: neighbours stay neighbours, distances between far groups mean little."),
      make("div", { class: "controls" }, make("label", {}, "Run ", make("select", { id: "embedding-run", onchange: (event) => { page.state.embeddingRun = event.target.value; this.draw(host); } }))),
      make("figure", {}, make("div", { class: "chart", id: "embedding-chart" }), make("figcaption", {})),
      make("div", { class: "absent" }));
  },
  draw(host) {
    const having = page.data.runs.filter((run) => run.embedding);
    for (const part of [".hint", ".controls", "figure"]) host.querySelector(part).hidden = having.length === 0;
    host.querySelector(".absent").replaceChildren(...(having.length ? [] : [missing("There is no t-SNE of the features yet.", page.data.runs.map((run) => run.path))]));
    if (!having.length) return;
    if (!having.some((run) => run.path === page.state.embeddingRun)) page.state.embeddingRun = having[0].path;
    syncOptions(host.querySelector("select"), having.map((run) => [run.path, runTitle(run)]), page.state.embeddingRun);
    const run = having.find((one) => one.path === page.state.embeddingRun);
    scatter(host.querySelector("#embedding-chart"), run.embedding, runTitle(run));
    host.querySelector("figcaption").textContent = `${runTitle(run)} after round ${run.embedding.round}, ${run.embedding.x.length} samples` +
      (run.embedding.left_out ? ` (${run.embedding.left_out} more are left out)` : "") + ".";
  },
});

function scatter(host, points, title) {
  const width = Math.min(widthOf(host), 640);
  const height = Math.round(width * 0.75);
  const ratio = page.printing ? 2 : window.devicePixelRatio || 1;
  const canvas = make("canvas", { width: Math.round(width * ratio), height: Math.round(height * ratio), role: "img", "aria-label": `t-SNE of ${points.x.length} samples of ${points.classes.length} classes, ${title}` });
  canvas.style.width = `${width}px`;
  canvas.style.height = `${height}px`;
  const readout = make("p", { class: "readout hint", role: "status" });
  const edges = (values) => [Math.min(...values), Math.max(...values)];
  const place = (values, size) => {
    const [low, high] = edges(values);
    return values.map((value) => 10 + (value - low) / (high - low || 1) * (size - 20));
  };
  const [x, y] = [place(points.x, width), place(points.y, height)];
  const context = canvas.getContext("2d");
  context.scale(ratio, ratio);
  context.globalAlpha = 0.8;
  points.class.forEach((label, index) => {
    context.fillStyle = points.colors[label];
    context.strokeStyle = variable("--faint");
    context.lineWidth = 0.4;
    context.beginPath();
    context.arc(x[index], y[index], 3, 0, 2 * Math.PI);
    context.fill();
    context.stroke();
  });
  canvas.onpointermove = (event) => {
    const bounds = canvas.getBoundingClientRect();
    const distances = x.map((at, index) => (at - event.clientX + bounds.left) ** 2 + (y[index] - event.clientY + bounds.top) ** 2);
    const nearest = distances.indexOf(Math.min(...distances));
    readout.textContent = distances[nearest] < 200 ? `class ${points.classes[points.class[nearest]]}` : "";
  };
  canvas.onpointerdown = canvas.onpointermove;
  const used = [...new Set(points.class)].sort((one, other) => one - other);
  const legend = make("ul", { class: "legend" }, used.map((label) => make("li", {},
    makeSvg("svg", { viewBox: "0 0 12 12", "aria-hidden": "true" }, makeSvg("circle", { cx: 6, cy: 6, r: 5, fill: points.colors[label], stroke: variable("--faint") })), ` ${points.classes[label]}`)));
  host.replaceChildren(canvas, readout, legend);
}

page.sections.push({
  id: "maps",
  title: "Entropy and segmentation maps",
  short: "Maps",
  build(host) {
    host.append(make("div", { class: "body" }));
  },
  draw(host) {
    const body = host.querySelector(".body");
    const shown = page.data.maps || [];
    if (body.dataset.drawn === String(shown.length)) return;
    body.dataset.drawn = String(shown.length);
    body.replaceChildren(...shown.flatMap((one) => [
      make("h3", {}, page.data.groups[one.group].title),
      make("div", { class: "pictures" }, one.pictures.map(({ name, source }) => make("figure", {}, make("img", { src: source, alt: name }), make("figcaption", {}, name.replaceAll(/[-_]/g, " "))))),
      one.left_out ? make("p", { class: "hint" }, `${one.left_out} more pictures are in ${one.path}/analysis/maps.`) : make("span"),
    ]));
    if (!shown.length) body.replaceChildren(page.data.metrics.some((metric) => metric.name.includes("iou"))
      ? missing("There are no maps yet.", page.data.runs.map((run) => run.path))
      : make("p", { class: "missing" }, "Only segmentation has maps; these runs classify."));
  },
});
