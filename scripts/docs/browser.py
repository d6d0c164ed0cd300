"""Debian's Chromium without a window, through Selenium: for the README's picture and for tests."""

import shutil
import tempfile
from contextlib import contextmanager

OPTIONS = """
--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking
--disable-component-update --disable-sync --hide-scrollbars
"""


def find_chromium():
    """Returns the paths of Chromium and its driver, or None if one of them is missing."""
    paths = shutil.which("chromium"), shutil.which("chromedriver")
    return paths if all(paths) else None


@contextmanager
def open_browser():
    """Starts Chromium with an empty profile; it ends with the block."""
    from selenium import webdriver

    chromium, driver = find_chromium()
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        for option in [*OPTIONS.split(), f"--user-data-dir={profile}"]:
            options.add_argument(option)
        # Given its path, Selenium does not look for a driver on the network.
        browser = webdriver.Chrome(options, webdriver.ChromeService(driver))
        try:
            yield browser
        finally:
            browser.quit()


def set_screen(browser, width, height=1000, dark=False, media=""):
    """Sets the size of the page, and whether the system is dark or the page is printed."""
    size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
    settings = {"media": media, "features": [scheme]}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", settings)
