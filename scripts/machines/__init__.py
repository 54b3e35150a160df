"""Test machines: made of Debian packages, booted by qemu, gone afterwards."""
