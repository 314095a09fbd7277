// Texts whose contrast against what lies behind them is below 4.5:1 (WCAG 2, AA).
(() => {
  const parse = (text) => {
    const [r, g, b, a = 1] = text.match(/[\d.]+/g).map(Number);
    return [r, g, b, a];
  };
  const linear = (v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
  const light = ([r, g, b]) => 0.2126 * linear(r / 255) + 0.7152 * linear(g / 255) + 0.0722 * linear(b / 255);
  const ground = (one) => {
    for (let at = one; at; at = at.parentElement) {
      const colour = parse(getComputedStyle(at).backgroundColor);
      if (colour[3] === 1) return colour;
    }
    return [255, 255, 255];
  };
  const poor = [];
  for (const one of document.body.querySelectorAll("*")) {
    const speaks = [...one.childNodes].some((node) => node.nodeType === Node.TEXT_NODE && node.data.trim());
    if (!speaks || one.closest("svg, .skip") || !one.checkVisibility()) continue;
    const [x, y] = [light(parse(getComputedStyle(one).color)), light(ground(one))].sort((p, q) => q - p);
    const ratio = (x + 0.05) / (y + 0.05);
    if (ratio < 4.5) poor.push(`${one.className}: ${one.textContent.slice(0, 30)}: ${ratio.toFixed(2)}`);
  }
  return poor;
})()
