// Every table as a CSV file, made here.

function saveButton(section) {
  return make("button", {
    type: "button", class: "save", "aria-label": `${section.title}: save the table as CSV`,
    onclick: () => download(`${section.id}.csv`, csvOf(section.rows())),
  }, "CSV");
}

function download(name, content) {
  const address = URL.createObjectURL(new Blob([content], { type: "text/csv" }));
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
