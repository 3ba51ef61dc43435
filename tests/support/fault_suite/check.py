"""What a test does with cases, on any hardware."""

from concurrent.futures import ThreadPoolExecutor

from fault_suite import runner, verdict


def problems(cases, hardware, starts, folder, record_property) -> dict[str, list[str]]:
    """Run cases in the same processes; return what is wrong with each, if anything.

    Args:
      cases: what to run.
      hardware: where.
      starts: the processes.
      folder: for flight records.
      record_property: pytest's, which gets the reports for the table at the end.
    """
    begun = runner.Begun(cases, hardware, folder, starts)
    return problems_of(begun.finish(), hardware, record_property)


def problems_beside(
    cases, hardware, starts, folder, record_property
) -> dict[str, list[str]]:
    """Do as ``problems``, with each case in processes of its own, side by side."""
    begun = [
        runner.Begun([case], hardware, folder / str(number), starts)
        for number, case in enumerate(cases)
    ]
    with ThreadPoolExecutor(len(begun)) as threads:
        reports = [report for (report,) in threads.map(runner.Begun.finish, begun)]
    return problems_of(reports, hardware, record_property)


def problems_of(reports, hardware, record_property) -> dict[str, list[str]]:
    """Record reports; return what is wrong with each case, if anything."""
    found = {}
    for report in reports:
        record_property("fault_report", report.to_json())
        found[str(report.case)] = verdict.problems(report, hardware)
    return {name: told for name, told in found.items() if told}
