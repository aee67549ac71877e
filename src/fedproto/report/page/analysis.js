// Analyses of final checkpoints: t-SNE of features, maps.

page.sections.push({
  id: "embedding",
  title: "Features (t-SNE)",
  short: "Features",
  empty() {
    return page.data.groups.some((group) => group.embedding) ? null : ["Needs", TO_ANALYSE];
  },
  build(host) {
    host.append(
      make("p", { class: "hint" }, "Features of test samples under the final model, and large, framed, the prototypes: the mean training feature of every class. Neighbours stay neighbours; distances between far groups mean little. Colour and shape show the class."),
      make("div", { class: "controls" }, chooser("embedding-run", "Run", "features")),
      make("div", { class: "chart", id: "embedding-chart" }), make("p", { class: "hint", id: "embedding-note" }));
  },
  chosen() {
    const having = page.shown.filter((group) => group.embedding);
    return { having, group: having.find((one) => one.title === page.state.features) || having[0] };
  },
  rows() {
    return [["run", "x", "y", "class", "prototype"], ...page.shown.filter((group) => group.embedding).flatMap(({ title, embedding }) => embedding.x.map((x, index) => [title, x, embedding.y[index], embedding.classes[embedding.class[index]], isPrototype(embedding, index)]))];
  },
  draw(host) {
    const { having, group } = this.chosen();
    host.querySelector("#embedding-chart").replaceChildren(...(group ? [scatter(group, Math.min(widthOf(host), 720))] : []));
    host.querySelector(".controls").hidden = having.length < 2;
    if (!group) return;
    syncOptions(host.querySelector("#embedding-run"), having.map((one) => [one.title, one.title]), group.title);
    host.querySelector("#embedding-note").textContent = `${group.title} after round ${group.embedding.round}, ${group.embedding.x.length - group.embedding.prototypes} samples.`;
  },
});

// They are the last points.
function isPrototype({ x, prototypes }, index) {
  return index >= x.length - prototypes;
}

function scatter({ embedding, title }, width) {
  const used = [...new Set(embedding.class)].sort((one, other) => one - other);
  const columns = Math.max(1, Math.floor(width / 120));
  const plot = Math.round(width * 0.7);
  const height = plot + 20 + 18 * Math.ceil(used.length / columns);
  const svg = svgOf(width, height, `t-SNE of ${embedding.x.length - embedding.prototypes} samples of ${used.length} classes, ${title}`);
  const scaled = (values, size) => scaleOf(extent([values]), [10, size - 10], false);
  const [x, y] = [scaled(embedding.x, width), scaled(embedding.y, plot)];
  const mark = (label, at, down, text, style) => makeSvg("path", { d: SHAPES[label % SHAPES.length](0, 0), transform: `translate(${at.toFixed(1)} ${down.toFixed(1)}) scale(0.6)`, fill: embedding.colors[label], stroke: variable("--faint"), "stroke-width": 0.5, ...style }, makeSvg("title", {}, text));
  embedding.class.forEach((label, index) => {
    const [at, down, name] = [x(embedding.x[index]), y(embedding.y[index]), embedding.classes[label]];
    svg.append(isPrototype(embedding, index) ? mark(label, at, down, `prototype of ${name}`, { class: "prototype", transform: `translate(${at.toFixed(1)} ${down.toFixed(1)}) scale(1.6)`, stroke: variable("--ink"), "stroke-width": 1.5 }) : mark(label, at, down, `class ${name}`));
  });
  used.forEach((label, index) => {
    const [at, down] = [10 + (index % columns) * 120, plot + 18 + 18 * Math.floor(index / columns)];
    svg.append(mark(label, at, down - 4, embedding.classes[label]), textAt(at + 10, down, shortened(embedding.classes[label], 15)));
  });
  return svg;
}

const CIVIDIS = [[0, 34, 78], [65, 77, 107], [124, 123, 120], [188, 175, 111], [254, 232, 56]];
const KINDS = { picture: "picture", truth: "truth", prediction: "prediction", "softmax-entropy": "entropy of the prediction", "feature-entropy": "entropy of the features" };

page.sections.push({
  id: "maps",
  title: "Entropy and segmentation maps",
  short: "Maps",
  empty() {
    if (page.data.maps?.length) return null;
    return page.data.metrics.some((metric) => metric.name.includes("iou")) ? ["Needs", TO_ANALYSE] : ["For segmentation only.", null];
  },
  build(host) {
    host.append(make("p", { class: "hint" }, "Picture and true label map, then the maps of each run."), make("div", { class: "body" }));
  },
  draw(host) {
    const body = host.querySelector(".body");
    const shown = page.data.maps.filter((one) => page.shown.some((group) => group.index === one.group));
    const split = (name) => { const at = name.indexOf("-"); return at < 0 ? [name, ""] : [name.slice(0, at), name.slice(at + 1)]; };
    const names = [...new Set(shown.flatMap((one) => Object.keys(one.pictures).map((name) => split(name)[0])))];
    const order = Object.keys(KINDS);
    const tile = (source, caption) => make("figure", {}, make("img", { src: source, alt: caption }), make("figcaption", {}, caption));
    body.replaceChildren(...names.map((picture) => {
      const first = shown.find((one) => Object.keys(one.pictures).some((name) => split(name)[0] === picture));
      const common = ["picture", "truth"].filter((kind) => first.pictures[`${picture}-${kind}`]).map((kind) => tile(first.pictures[`${picture}-${kind}`], `${picture}: ${KINDS[kind]}`));
      const kinds = [...new Set(shown.flatMap((one) => Object.keys(one.pictures)).filter((name) => split(name)[0] === picture).map((name) => split(name)[1]))].filter((kind) => !["picture", "truth"].includes(kind)).sort((one, other) => order.indexOf(one) - order.indexOf(other));
      return make("div", { class: "pictures" }, common, kinds.flatMap((kind) => shown.filter((one) => one.pictures[kind ? `${picture}-${kind}` : picture]).map((one) => tile(one.pictures[kind ? `${picture}-${kind}` : picture], `${KINDS[kind] || kind || picture}, ${page.data.groups[one.group].title}`))));
    }), mapKeys(shown));
  },
});

// Label maps have the colours of PASCAL VOC; black is the background.
function mapKeys(shown) {
  const heat = [0, 0.25, 0.5, 0.75, 1].map((share) => `rgb(${between(CIVIDIS, share).join(" ")})`);
  const bar = make("span", { class: "bar", "aria-hidden": "true" });
  bar.style.background = `linear-gradient(to right, ${heat.join(", ")})`;
  const known = new Map(shown.flatMap((one) => one.classes));
  return make("ul", { class: "legend", id: "map-keys" }, make("li", {}, "entropy: 0 ", bar, " maximum"), [...known].map(([name, color]) => make("li", {}, colorBox(color), ` ${name}`)));
}

function colorBox(color) {
  return makeSvg("svg", { viewBox: "0 0 12 12", "aria-hidden": "true" }, makeSvg("rect", { width: 12, height: 12, fill: color, stroke: variable("--faint") }));
}
