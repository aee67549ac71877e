// Tables as CSV, charts as SVG: buttons in every section, files made here.

const CELL = 460;

function saveButtons(section) {
  const button = (text, label, onclick) => make("button", { type: "button", class: "save", "aria-label": label, onclick }, text);
  return make("div", { class: "saves" },
    section.rows ? button("CSV", `${section.title}: save the table as CSV`, () => download(`${section.id}.csv`, "text/csv", csvOf(section.rows()))) : null,
    section.drawings ? button("SVG", `${section.title}: save the charts as SVG`, () => download(`${section.id}.svg`, "image/svg+xml", new XMLSerializer().serializeToString(sheet(section)))) : null);
}

function download(name, type, content) {
  const address = URL.createObjectURL(new Blob([content], { type }));
  const link = make("a", { href: address, download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(address), 10000);
}

function csvOf(rows) {
  const cell = (value) => {
    let text = value === null || value === undefined ? "" : String(value);
    // What a spreadsheet would take for a formula begins with a quote.
    if (typeof value === "string" && /^\s*[=+\-@＝＋－＠]/.test(text) && isNaN(Number(text))) text = `'${text}`;
    return /[",\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
  };
  return rows.map((row) => row.map(cell).join(",")).join("\n") + "\n";
}

// All charts of a section on one sheet, with a title.
function sheet(section) {
  const drawings = section.drawings();
  const columns = Math.min(3, drawings.length) || 1;
  const cell = columns === 1 ? 760 : CELL;
  const width = columns * cell + 20;
  let y = 46;
  const sheetSvg = svgOf(width, y, section.title);
  const rest = [];
  for (let index = 0; index < drawings.length; index += columns) {
    const row = drawings.slice(index, index + columns).map((drawing) => ({ title: drawing.title, svg: drawing.draw(cell - 20) }));
    row.forEach(({ title, svg }, column) => {
      svg.setAttribute("x", 10 + column * cell);
      svg.setAttribute("y", y + 22);
      rest.push(textAt(16 + column * cell, y + 12, shortened(title, 60), { fill: variable("--ink"), "font-weight": 600 }), svg);
    });
    y += 34 + Math.max(...row.map(({ svg }) => svg.viewBox.baseVal.height));
  }
  sheetSvg.setAttribute("viewBox", `0 0 ${width} ${y}`);
  sheetSvg.setAttribute("height", y);
  sheetSvg.append(makeSvg("rect", { width, height: y, fill: variable("--paper") }),
    textAt(16, 28, `${page.data.title}: ${section.title}`, { fill: variable("--ink"), "font-size": 17, "font-weight": 600 }), ...rest);
  return sheetSvg;
}
