// What the model sees of a picture or clip: its tiles or frames as `POST /v1/previews` gives them, with the numbers.

/** Shows a preview inside an element. Gives one sentence that says the same. */
export function showSeen(element, preview) {
  return preview.clip ? showFrames(element, preview) : showTiles(element, preview);
}

/** A time in a clip, such as 0:03.5. */
export function clock(seconds) {
  const tenths = Math.round(seconds * 10);
  const rest = ((tenths % 600) / 10).toFixed(1).padStart(4, "0");
  return `${Math.floor(tenths / 600)}:${rest}`;
}

function showTiles(element, { image, rows, columns, tiles }) {
  const whole = tiles.at(-1);
  const grid = tiles.slice(0, -1);
  element.replaceChildren();
  if (grid.length) {
    const cut = document.createElement("div");
    cut.className = "seen-grid";
    cut.style.setProperty("--columns", columns);
    cut.style.setProperty("--rows", rows);
    cut.append(...grid.map((tile) => picture(tile, `tile ${tile.row}, ${tile.column}`)));
    element.append(figure(cut, `${rows} × ${columns} tiles`));
    element.append(figure(picture(whole, "the whole picture"), "and the whole"));
  } else {
    element.append(picture(whole, "the picture as the model sees it"));
  }
  element.dataset.kind = grid.length ? "tiles" : "whole";
  const size = `${whole.width} × ${whole.height}`;
  const pieces = grid.length ? `${tiles.length} tiles of ${size}` : `one tile of ${size}`;
  return `${image.width} × ${image.height} pixels become ${pieces}: ${image.num_tokens.toLocaleString("en")} tokens.`;
}

function showFrames(element, { clip, frames }) {
  const film = document.createElement("ol");
  film.className = "seen-film";
  for (const frame of frames) {
    const item = document.createElement("li");
    item.append(figure(picture(frame, `the frame at ${clock(frame.time_s)}`), clock(frame.time_s)));
    film.append(item);
  }
  element.replaceChildren(film);
  element.dataset.kind = "film";
  const many = frames.length === 1 ? "1 frame" : `${frames.length} frames`;
  return (
    `${clip.duration_s.toFixed(1)} s become ${many} of ${frames[0].width} × ${frames[0].height}: ` +
    `${clip.num_tokens.toLocaleString("en")} tokens.`
  );
}

function picture({ url, width, height }, alt) {
  const image = new Image(width, height);
  Object.assign(image, { src: url, alt });
  return image;
}

function figure(content, text) {
  const figure = document.createElement("figure");
  const caption = document.createElement("figcaption");
  caption.textContent = text;
  figure.append(content, caption);
  return figure;
}
