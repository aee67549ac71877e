// Options of every group, and directory, versions and notes of every run.

function valueText(value) {
  if (value === undefined || value === null) return "–";
  return typeof value === "string" ? value || "–" : JSON.stringify(value);
}

page.sections.push({
  id: "configuration",
  title: "Configuration",
  build(host) {
    const draw = () => this.draw(host);
    host.append(
      make("details", { id: "options", ontoggle: draw }, make("summary", {}, "Options"),
        make("div", { class: "controls" }, switcher("only-differences", "only options in which groups differ", "only")),
        scrolling("configuration-scroll", "Options of the groups", make("table", { class: "words", id: "configuration-table" }))),
      make("details", { id: "runs-list", ontoggle: draw }, make("summary", {}), make("div", { id: "run-list" })));
    host.querySelector("#configuration-scroll").classList.add("tall");
  },
  rows() {
    const { common, differing, groups } = page.data;
    return [["run", ...Object.keys(differing), ...Object.keys(common)], ...page.shown.map(({ index }) => [groups[index].title, ...Object.values(differing).map((values) => valueText(values[index])), ...Object.values(common).map(valueText)])];
  },
  draw(host) {
    const { common, differing, groups } = page.data;
    host.querySelector("#only-differences").checked = page.state.only;
    host.querySelector("#runs-list summary").textContent = `${page.data.runs.length} run${page.data.runs.length === 1 ? "" : "s"}: directories, times, versions, notes`;
    if (host.querySelector("#options").open) {
      const names = [...Object.keys(differing).filter((name) => name !== "label"), ...(page.state.only && groups.length > 1 ? [] : Object.keys(common))];
      const rows = page.shown.map((group) => [[swatch(group.method), "\u00a0", group.title], ...names.map((name) => valueText(differing[name] ? differing[name][group.index] : common[name]))]);
      host.querySelector("table").replaceChildren(...tableOf(["run", ...names.map((name) => make("th", { scope: "col" }, make("code", {}, name)))], rows).children);
    }
    if (host.querySelector("#runs-list").open) {
      const list = host.querySelector("#run-list");
      const open = new Set([...list.querySelectorAll("details[open]")].map((one) => one.dataset.path));
      const places = new Set(page.shown.map((group) => group.index));
      list.replaceChildren(...page.data.runs.filter((run) => places.has(run.group)).map((run) => runDetails(run, open.has(run.path))));
    }
  },
});

function runDetails(run, open) {
  const facts = [
    ["directory", run.path],
    ["rounds", `${run.rounds} of ${run.planned}; ${run.ended || "not finished"}`],
    ["time", formatSeconds(run.seconds.total)],
    ["data", run.data || "–"],
    ["failed updates", String(run.failures)],
    ...Object.entries(run.environment),
  ];
  const notes = [...run.notes, ...(run.more_notes ? [`and ${run.more_notes} more`] : [])];
  if (notes.length) facts.push(["notes", notes.join("; ")]);
  return make("details", { open, "data-path": run.path },
    make("summary", {}, `${runTitle(run)}: ${run.ended || `${run.rounds} of ${run.planned} rounds`}`),
    make("dl", {}, facts.flatMap(([name, value]) => [make("dt", {}, name), make("dd", {}, value)])));
}
