// A model card's Markdown as elements: headings, paragraphs, lists, tables, code, emphasis. Everything else is text, so
// nothing in a card can bring script or pictures into the page.

/** The elements of a text. Headings begin at `level`. */
export function markdown(text, level = 3) {
  const blocks = text.replaceAll("\r\n", "\n").replace(/^---\n[^]*?\n---\n/, "").split(/\n{2,}(?=\S)/);
  const fragment = document.createDocumentFragment();
  const lines = blocks.flatMap((block) => [...block.split("\n"), ""]);
  let paragraph = [];
  const flush = () => {
    if (paragraph.length) fragment.append(make(paragraph));
    paragraph = [];
  };
  for (let index = 0; index < lines.length; index++) {
    const row = lines[index];
    const heading = /^(#{1,6})\s+(.*)$/.exec(row);
    if (row.startsWith("```")) {
      flush();
      const code = [];
      while (++index < lines.length && !lines[index].startsWith("```")) code.push(lines[index]);
      const pre = document.createElement("pre");
      pre.tabIndex = 0;
      pre.textContent = code.join("\n").trimEnd();
      fragment.append(pre);
    } else if (heading) {
      flush();
      const element = document.createElement(`h${Math.min(level + heading[1].length - 1, 6)}`);
      inline(element, heading[2]);
      fragment.append(element);
    } else if (!row.trim()) flush();
    else if (paragraph.length && kind(row) !== kind(paragraph[0]) && kind(row) !== "text") {
      flush();
      paragraph.push(row);
    } else paragraph.push(row);
  }
  flush();
  return fragment;
}

const kind = (row) => (/^\s*\|/.test(row) ? "table" : /^\s*(?:[-*]|\d+\.)\s/.test(row) ? "list" : "text");

function make(rows) {
  if (kind(rows[0]) === "table") return table(rows);
  if (kind(rows[0]) === "list") return list(rows);
  const paragraph = document.createElement("p");
  inline(paragraph, rows.join(" "));
  return paragraph;
}

function list(rows) {
  const element = document.createElement(/^\s*\d/.test(rows[0]) ? "ol" : "ul");
  const items = [];
  for (const row of rows) {
    if (kind(row) === "list") items.push(row.replace(/^\s*(?:[-*]|\d+\.)\s+/, ""));
    else items[items.length - 1] += ` ${row.trim()}`;
  }
  element.append(...items.map((text) => inline(document.createElement("li"), text)));
  return element;
}

function table(rows) {
  const cells = rows.map((row) => row.trim().replace(/^\||\|$/g, "").split("|").map((cell) => cell.trim()));
  const [head, ...body] = cells.filter((row) => !row.every((cell) => /^:?-+:?$/.test(cell)));
  const scroller = document.createElement("div");
  scroller.className = "card-table";
  scroller.tabIndex = 0;
  scroller.setAttribute("role", "group");
  scroller.setAttribute("aria-label", "Table");
  const element = document.createElement("table");
  const line = (row, tag) => {
    const made = document.createElement("tr");
    made.append(...row.map((text) => inline(document.createElement(text ? tag : "td"), text)));
    return made;
  };
  element.append(line(head, "th"), ...body.map((row) => line(row, "td")));
  scroller.append(element);
  return scroller;
}

function inline(element, text) {
  const parts = text.split(/(`[^`]+`|\*\*[^*]+\*\*|\*[^*\s][^*]*\*|\[[^\]]+\]\((?:[^()]|\([^()]*\))*\))/);
  for (const part of parts) {
    const tag = part.startsWith("`") ? "code" : part.startsWith("**") ? "strong" : /^\*[^*]/.test(part) ? "em" : "";
    const link = /^\[([^\]]+)\]\(/.exec(part);
    if (link) element.append(link[1]);
    else if (tag) element.append(Object.assign(document.createElement(tag), { textContent: part.replace(/^[`*]+|[`*]+$/g, "") }));
    else element.append(part);
  }
  return element;
}
