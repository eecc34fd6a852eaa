// The only way elements are made: text is always text. Nothing here, or elsewhere, parses HTML.
export function el(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined && value !== false) made.setAttribute(name, value === true ? "" : value);
  }
  for (const child of children.flat(Infinity)) {
    if (child !== null && child !== undefined) made.append(child instanceof Node ? child : shown(String(child)));
  }
  return made;
}

// Control characters are visible, and no text changes the direction of what is around it (see `bdi`).
export function shown(text) {
  return document.createTextNode(text.replace(/[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u202a-\u202e\u2066-\u2069]/g, "\ufffd"));
}

export const bdi = (text) => el("bdi", {}, text);
export const link = (to, text) => el("a", { href: `#/${to.split("/").map(encodeURIComponent).join("/")}` }, bdi(text));

export function table(heads, rows, caption) {
  const cell = (value, tag) => el(tag, { class: typeof value === "number" ? "number" : null }, format(value));
  return el("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": caption },
    el("table", {}, el("caption", { class: "soft" }, caption),
      el("thead", {}, el("tr", {}, heads.map((head) => el("th", { scope: "col" }, head)))),
      el("tbody", {}, rows.map((row) => el("tr", {}, row.map((value) => cell(value, "td")))))));
}

export function format(value) {
  if (typeof value !== "number") return value ?? "";
  if (Number.isInteger(value)) return value.toLocaleString("en");
  return Math.abs(value) >= 1000 ? Math.round(value).toLocaleString("en") : Number(value.toPrecision(4)).toString();
}

export const when = (ms) => (ms ? new Date(ms).toISOString().replace("T", " ").slice(0, 19) : "");
