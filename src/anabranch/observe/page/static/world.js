// The world's outline and the positions of places, in degrees east and north.

import { GEOGRAPHY } from "./geography.js";

const LAND = Object.values(GEOGRAPHY.outlines), LAKES = Object.values(GEOGRAPHY.lakes);

// Without a prototype: a region may be called "constructor".
export const PLACES = {
  __proto__: null,
  ...GEOGRAPHY.cities,
  ...Object.fromEntries(Object.entries(GEOGRAPHY.regions).map(([name, place]) => [name.toLowerCase(), place])),
};

export const NORTH = 78, SOUTH = -56;

export function landDots(step) {
  const dots = [];
  let row = 0;
  for (let lat = SOUTH; lat <= NORTH; lat += step, row += 1) {
    for (let lon = -180 + (row % 2 ? step / 2 : 0); lon < 180; lon += step) if (onLand(lon, lat)) dots.push([lon, lat]);
  }
  return dots;
}

function onLand(lon, lat) {
  const within = (ring) => inside(ring, lon, lat);
  return LAND.some(within) && !LAKES.some(within);
}

function inside(ring, x, y) {
  let within = false;
  for (let i = 0, j = ring.length - 2; i < ring.length; j = i, i += 2) {
    const [xi, yi, xj, yj] = [ring[i], ring[i + 1], ring[j], ring[j + 1]];
    if (yi > y !== yj > y && x < ((xj - xi) * (y - yi)) / (yj - yi) + xi) within = !within;
  }
  return within;
}
