// A picture or clip large, as its visitor sees it.

/** Shows a Medium. A file that the browser cannot show (AVI, HEIC) is shown as the server decodes it. */
export function ownView(medium) {
  const view = document.createElement(medium.isClip ? "video" : "img");
  view.className = "picture-own";
  const fallBack = async () => {
    const preview = await medium.preview().catch(() => null);
    const url = preview && (preview.frames?.[0] ?? preview.tiles.at(-1)).url;
    if (url) view.replaceWith(Object.assign(new Image(), { src: url, className: "picture-own", alt: medium.name }));
  };
  view.addEventListener("error", fallBack, { once: true });
  if (medium.isClip) {
    Object.assign(view, { src: medium.url, controls: true, muted: true, loop: true, autoplay: !still(), playsInline: true });
    view.setAttribute("aria-label", medium.name || "the clip");
  } else {
    Object.assign(view, { src: medium.url, alt: medium.name || "the picture" });
  }
  return view;
}

const still = () => matchMedia("(prefers-reduced-motion: reduce)").matches;
