"""Tests on the real runtime: runc, CRIU and hosts of the local fleet. Root only; each test's hosts are gone afterwards."""
