// Answers in a shape, as words. JSON that is still being written is shown without its signs, so that it can be read.

/** The text for people: `{"objects": ["cat", "table"]}` → `cat, table`. Other text stays as it is. */
export function readable(text) {
  const start = text.trimStart();
  if (!start.startsWith("{") && !start.startsWith("[")) return text;
  try {
    return words(JSON.parse(start));
  } catch {
    return start
      .replace(/^\{\s*"\w+"\s*:\s*\[/, "") // one list: its name will not be shown either
      .replace(/"(\w+)"\s*:/g, (_, name) => `${name}: `)
      .replace(/[{}[\]"]/g, "")
      .replace(/\s+/g, " ")
      .trim();
  }
}

function words(value) {
  if (Array.isArray(value)) return value.length ? value.map(words).join(value.some(isObject) ? "\n" : ", ") : "nothing";
  if (!isObject(value)) return value === null ? "unknown" : String(value);
  const pairs = Object.entries(value);
  if (pairs.length === 1) return words(pairs[0][1]);
  return pairs.map(([name, each]) => `${name}: ${words(each)}`).join("\n");
}

const isObject = (value) => typeof value === "object" && value !== null && !Array.isArray(value);
