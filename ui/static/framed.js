// Pictures as they can hang in the frame of a placard: elements that show something from the first moment on.

import { Medium } from "./media.js";

/** A picture of an address that this page owns. Rejects when this browser cannot show it. */
export async function decoded(src) {
  const picture = Object.assign(new Image(), { src, className: "placard-picture", alt: "" });
  try {
    await picture.decode();
  } catch (error) {
    URL.revokeObjectURL(src);
    throw error;
  }
  return picture;
}

/** What the browser cannot show (TIFF, HEIC) as the server decodes it. */
export async function asTheServerSees(blob) {
  const medium = new Medium(blob);
  try {
    const { tiles } = await medium.preview();
    return await decoded(tiles.at(-1).url);
  } finally {
    medium.close();
  }
}
