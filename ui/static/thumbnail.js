// Small copies of pictures, to remember them by.

const SIDE = 320; // pixels, the longer one

/** A small JPEG of a picture, as an address in this browser; "" of what cannot be read. The caller revokes it. */
export async function thumbnailOf(blob) {
  let picture;
  try {
    picture = await createImageBitmap(blob);
  } catch {
    return "";
  }
  const scale = Math.min(1, SIDE / Math.max(picture.width, picture.height));
  const canvas = document.createElement("canvas");
  canvas.width = Math.max(1, Math.round(picture.width * scale));
  canvas.height = Math.max(1, Math.round(picture.height * scale));
  canvas.getContext("2d").drawImage(picture, 0, 0, canvas.width, canvas.height);
  picture.close();
  const small = await new Promise((resolve) => canvas.toBlob(resolve, "image/jpeg", 0.75));
  return small ? URL.createObjectURL(small) : ""; // null: the browser had no memory for it
}
