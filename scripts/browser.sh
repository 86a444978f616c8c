#!/usr/bin/env bash
# Headless Chromium and its driver for the screenshot tests, from the system's own packages.
# Without root or apt the tests that need a browser say so and are skipped.
set -euo pipefail
command -v chromium >/dev/null && command -v chromedriver >/dev/null && exit 0
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
  export DEBIAN_FRONTEND=noninteractive
  apt-get update -qq && apt-get install -y -qq chromium chromium-driver >/dev/null
else
  echo "no chromium and chromedriver here: browser tests will be skipped" >&2
fi
