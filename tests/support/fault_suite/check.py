"""What a test does with cases, on any hardware."""

from fault_suite import runner, verdict


def problems(cases, hardware, starts, folder, record_property) -> dict[str, list[str]]:
    """Runs cases in the same processes; returns what is wrong with each that is not.

    Args:
      cases: what to run.
      hardware: where.
      starts: the processes.
      folder: for flight records.
      record_property: pytest's, which gets the reports for the table at the end.
    """
    begun = runner.Begun(cases, hardware, folder, starts)
    return problems_of(begun.finish(), hardware, record_property)


def problems_of(reports, hardware, record_property) -> dict[str, list[str]]:
    """Records reports; returns what is wrong with each case that is not right."""
    found = {}
    for report in reports:
        record_property("fault_report", report.to_json())
        found[str(report.case)] = verdict.problems(report, hardware)
    return {name: told for name, told in found.items() if told}
