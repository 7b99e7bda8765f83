// Untrusted text. Everything shown goes through visible() and into text nodes; nothing is ever markup.

const FOLD = 3000; // characters of a text that are shown at once
const MORE = 50000; // and with each further click

// Control characters, marks that change the direction of writing, and what has no width.
const HIDDEN =
  /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u061c\u115f\u1160\u17b4\u17b5\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\u3164\ufeff\uffa0\ufff9-\ufffb]|[\u{e0000}-\u{e007f}]|[\ud800-\udfff]/gu;

function mark(character) {
  const code = character.codePointAt(0);
  if (code < 0x20) return String.fromCodePoint(0x2400 + code);
  if (code === 0x7f) return "\u2421";
  return `\u27e6U+${code.toString(16).toUpperCase().padStart(4, "0")}\u27e7`;
}

function visible(text) {
  return String(text).replace(HIDDEN, mark);
}

function shorten(text, most) {
  const all = String(text);
  return all.length <= most ? all : `${all.slice(0, most)}\u2026`;
}

// A text block; long texts are folded and expanded in steps.
function textBlock(text, kind) {
  const all = String(text ?? "");
  const block = h("pre", { class: `text ${kind ?? ""}` });
  let shown = 0;
  const more = h("button", { class: "more", type: "button", onclick: () => open(MORE) });
  function open(count) {
    let end = Math.min(all.length, shown + count);
    if (end < all.length && /[\ud800-\udbff]/.test(all[end - 1])) end += 1;
    block.insertBefore(document.createTextNode(visible(all.slice(shown, end))), more.parentNode === block ? more : null);
    shown = end;
    if (shown < all.length) {
      const left = all.length - shown;
      more.textContent = `show ${whole(Math.min(MORE, left))} more of ${whole(all.length)} characters`;
      block.append(more);
    } else {
      more.remove();
    }
  }
  open(all.length <= FOLD * 1.5 ? all.length : FOLD);
  return block;
}
