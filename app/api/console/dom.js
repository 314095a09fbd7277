// Building elements and bringing the page up to them. Text only ever becomes a text node: what a file name, an error or a
// policy says is shown as it is written, whatever it looks like.

const SVG = "http://www.w3.org/2000/svg";
const SHAPES = new Set(["svg", "path", "line", "rect"]);

/** An element. attributes: null, undefined and false are left out, true is "". children: nodes, texts, arrays, null. */
export function h(tag, attributes = {}, ...children) {
  const made = SHAPES.has(tag) ? document.createElementNS(SVG, tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== null && value !== undefined && value !== false) made.setAttribute(name, value === true ? "" : value);
  }
  for (const child of children.flat(Infinity)) {
    if (child !== null && child !== undefined && child !== false) {
      made.append(child instanceof Node ? child : document.createTextNode(String(child)));
    }
  }
  return made;
}

/** Make `have` look like `want` and leave alone what is equal: focus, selection and open details stay where they are. */
export function morph(have, want) {
  if (have.nodeName !== want.nodeName) {
    have.replaceWith(want);
  } else if (have.nodeType === Node.TEXT_NODE) {
    if (have.data !== want.data) have.data = want.data;
  } else {
    attributes(have, want);
    children(have, want);
  }
}

function attributes(have, want) {
  for (const { name } of [...have.attributes]) {
    if (!want.hasAttribute(name) && !(name === "open" && have.nodeName === "DETAILS")) have.removeAttribute(name);
  }
  for (const { name, value } of want.attributes) {
    if (have.getAttribute(name) !== value) have.setAttribute(name, value);
  }
}

function children(have, want) {
  const known = new Map([...have.children].filter((one) => one.dataset.key).map((one) => [one.dataset.key, one]));
  let at = have.firstChild;
  for (const next of [...want.childNodes]) {
    const key = next.dataset?.key;
    const same = key ? known.get(key) : at && !at.dataset?.key && at.nodeName === next.nodeName ? at : null;
    if (!same) {
      have.insertBefore(next, at);
      continue;
    }
    if (same === at) at = at.nextSibling;
    else have.insertBefore(same, at);
    morph(same, next);
  }
  while (at) {
    const gone = at;
    at = at.nextSibling;
    gone.remove();
  }
}
