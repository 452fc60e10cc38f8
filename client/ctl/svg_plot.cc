// SPDX-License-Identifier: Apache-2.0
#include "client/ctl/svg_plot.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>

#include "absl/strings/str_format.h"
#include "proto/base/check.h"

namespace kvtier::ctl {
namespace {

constexpr double kWidth = 960;
constexpr double kLeft = 70;
constexpr double kRight = 20;
constexpr double kTop = 66;  // title and legend
constexpr double kPlotHeight = 260;
constexpr double kBottom = 46;  // tick labels and the axis' label
constexpr double kGlyph = 7.0;  // width of a character of 11 px in wide fonts, about

// Okabe and Ito's colours, which most colour-blind people tell apart.
constexpr std::array<const char*, 7> kColours = {"#0072B2", "#E69F00", "#009E73", "#CC79A7",
                                                 "#D55E00", "#56B4E9", "#444444"};

const char* ColourOf(size_t series) { return kColours[series % kColours.size()]; }

std::string Escaped(const std::string& text) {
  std::string result;
  for (const char c : text) {
    switch (c) {
      case '&':
        result += "&amp;";
        break;
      case '<':
        result += "&lt;";
        break;
      case '>':
        result += "&gt;";
        break;
      case '"':
        result += "&quot;";
        break;
      default:
        // XML has no control characters.
        result += static_cast<unsigned char>(c) < 0x20 ? ' ' : c;
    }
  }
  return result;
}

// `place` is more attributes, "" or with a leading space.
std::string Text(double x, double y, const std::string& place, const std::string& text) {
  return absl::StrFormat("<text x=\"%.1f\" y=\"%.1f\"%s>%s</text>\n", x, y, place, Escaped(text));
}

std::string Line(double x1, double y1, double x2, double y2, const char* colour) {
  return absl::StrFormat("<line x1=\"%.1f\" y1=\"%.1f\" x2=\"%.1f\" y2=\"%.1f\" stroke=\"%s\"/>\n",
                         x1, y1, x2, y2, colour);
}

// Maps values to [0, 1] and knows its ticks.
class Axis {
 public:
  // Over all values that have a place on the axis; `with_zero` only matters on a linear one.
  Axis(const std::vector<double>& values, bool log, bool with_zero) : log_(log) {
    double low = std::numeric_limits<double>::infinity();
    double high = -low;
    for (const double value : values) {
      if (!Has(value)) continue;
      low = std::min(low, value);
      high = std::max(high, value);
    }
    if (low > high) {
      low = log ? 0.1 : 0.0;
      high = 1.0;
    }
    if (log) {
      low_ = std::floor(std::log10(low));
      high_ = std::max(std::ceil(std::log10(high)), low_ + 1);
      step_ = 1.0;
      return;
    }
    if (with_zero) {
      low = std::min(low, 0.0);
      high = std::max(high, 0.0);
    }
    if (low == high) high = low + 1.0;
    step_ = NiceStep((high - low) / 5);
    low_ = std::floor(low / step_) * step_;
    high_ = std::ceil(high / step_) * step_;
  }

  bool Has(double value) const { return std::isfinite(value) && (!log_ || value > 0.0); }
  double At(double value) const {
    return ((log_ ? std::log10(value) : value) - low_) / (high_ - low_);
  }
  double Base() const { return log_ ? 0.0 : std::clamp(At(0.0), 0.0, 1.0); }

  // (place, label; no label on the lines between decades).
  std::vector<std::pair<double, std::string>> Ticks() const {
    std::vector<std::pair<double, std::string>> ticks;
    const auto count = static_cast<int>(std::lround((high_ - low_) / step_));
    for (int i = 0; i <= count; ++i) {
      const double value = low_ + i * step_;
      const double place = (value - low_) / (high_ - low_);
      // Without -0 and the rounding errors of sums.
      const double shown = std::abs(value) < step_ * 1e-9 ? 0.0 : value;
      ticks.emplace_back(place, absl::StrFormat("%.6g", log_ ? std::pow(10.0, value) : shown));
      if (!log_ || i == count) continue;
      for (const double part : {2.0, 5.0}) {
        ticks.emplace_back((value + std::log10(part) - low_) / (high_ - low_), "");
      }
    }
    return ticks;
  }

 private:
  // 1, 2 or 5 times a power of ten, at least `rough`.
  static double NiceStep(double rough) {
    const double decade = std::pow(10.0, std::floor(std::log10(rough)));
    for (const double part : {1.0, 2.0, 5.0}) {
      if (part * decade >= rough) return part * decade;
    }
    return 10.0 * decade;
  }

  bool log_;
  double low_ = 0.0;
  double high_ = 1.0;
  double step_ = 1.0;
};

double PlaceX(double share) { return kLeft + share * (kWidth - kLeft - kRight); }
double PlaceY(double share) { return kTop + (1.0 - share) * kPlotHeight; }

std::string Frame(const std::string& title, const std::string& y_label, const Axis& y) {
  std::string svg = Text(kLeft, 22, " font-size=\"14\" font-weight=\"bold\"", title);
  for (const auto& [place, label] : y.Ticks()) {
    svg += Line(kLeft, PlaceY(place), kWidth - kRight, PlaceY(place),
                label.empty() ? "#f0f0f0" : "#cccccc");
    if (!label.empty()) svg += Text(kLeft - 6, PlaceY(place) + 4, " text-anchor=\"end\"", label);
  }
  const double middle = PlaceY(0.5);
  svg += Text(16, middle,
              absl::StrFormat(" text-anchor=\"middle\" transform=\"rotate(-90 16 %.1f)\"", middle),
              y_label);
  return svg;
}

template <typename Series>
std::string Legend(const std::vector<Series>& series) {
  std::string svg;
  double x = kLeft;
  for (size_t i = 0; i < series.size(); ++i) {
    svg += absl::StrFormat("<rect x=\"%.1f\" y=\"36\" width=\"11\" height=\"11\" fill=\"%s\"/>\n",
                           x, ColourOf(i));
    svg += Text(x + 16, 46, "", series[i].name);
    x += 16 + kGlyph * static_cast<double>(series[i].name.size()) + 20;
  }
  return svg;
}

std::string Bars(const BarChart& chart, const Axis& y) {
  std::string svg;
  const double group_width = 1.0 / static_cast<double>(std::max<size_t>(chart.groups.size(), 1));
  const double bar_width =
      0.8 * group_width / static_cast<double>(std::max<size_t>(chart.series.size(), 1));
  for (size_t s = 0; s < chart.series.size(); ++s) {
    const BarChart::Series& series = chart.series[s];
    KVT_CHECK(series.values.size() == chart.groups.size());
    for (size_t g = 0; g < series.values.size(); ++g) {
      const double value = series.values[g];
      if (!y.Has(value)) continue;
      const double left =
          (static_cast<double>(g) + 0.1) * group_width + static_cast<double>(s) * bar_width;
      const double low = std::min(y.At(value), y.Base());
      const double high = std::max(y.At(value), y.Base());
      svg += absl::StrFormat(
          "<rect x=\"%.2f\" y=\"%.2f\" width=\"%.2f\" height=\"%.2f\" fill=\"%s\"><title>%s, %s: "
          "%.4g</title></rect>\n",
          PlaceX(left), PlaceY(high), PlaceX(left + bar_width) - PlaceX(left),
          PlaceY(low) - PlaceY(high), ColourOf(s), Escaped(chart.groups[g]), Escaped(series.name),
          value);
    }
  }
  return svg;
}

// Slanted names under the groups; *height is what they need.
std::string GroupNames(const BarChart& chart, double* height) {
  std::string svg;
  size_t longest = 0;
  for (size_t g = 0; g < chart.groups.size(); ++g) {
    longest = std::max(longest, chart.groups[g].size());
    const double x =
        PlaceX((static_cast<double>(g) + 0.5) / static_cast<double>(chart.groups.size()));
    const double y = PlaceY(0.0) + 14;
    svg += Text(x, y,
                absl::StrFormat(" text-anchor=\"end\" transform=\"rotate(-40 %.1f %.1f)\"", x, y),
                chart.groups[g]);
  }
  constexpr double kSlant = 0.65;  // sin(40 degrees)
  *height = 24 + kSlant * kGlyph * static_cast<double>(longest);
  return svg;
}

// The chart with its corner at (0, 0); *height is what it takes.
std::string Draw(const BarChart& chart, double* height) {
  std::vector<double> values;
  for (const BarChart::Series& series : chart.series) {
    values.insert(values.end(), series.values.begin(), series.values.end());
  }
  const Axis y(values, chart.log_y, /*with_zero=*/true);
  double names_height = 0.0;
  std::string svg = Frame(chart.title, chart.y_label, y) + Legend(chart.series) + Bars(chart, y) +
                    GroupNames(chart, &names_height);
  svg += Line(kLeft, PlaceY(y.Base()), kWidth - kRight, PlaceY(y.Base()), "#333333");
  *height = kTop + kPlotHeight + names_height;
  return svg;
}

std::string Draw(const LineChart& chart, double* height) {
  std::vector<double> xs;
  std::vector<double> ys;
  for (const LineChart::Series& series : chart.series) {
    for (const auto& [x, y] : series.points) {
      xs.push_back(x);
      ys.push_back(y);
    }
  }
  const Axis x_axis(xs, chart.log_x, /*with_zero=*/false);
  const Axis y_axis(ys, chart.log_y, /*with_zero=*/false);
  std::string svg = Frame(chart.title, chart.y_label, y_axis) + Legend(chart.series);
  for (const auto& [place, label] : x_axis.Ticks()) {
    svg += Line(PlaceX(place), PlaceY(0.0), PlaceX(place), PlaceY(0.0) + 4, "#333333");
    svg += Text(PlaceX(place), PlaceY(0.0) + 18, " text-anchor=\"middle\"", label);
  }
  svg += Text(PlaceX(0.5), PlaceY(0.0) + 36, " text-anchor=\"middle\"", chart.x_label);
  svg += Line(kLeft, PlaceY(0.0), kWidth - kRight, PlaceY(0.0), "#333333");
  for (size_t s = 0; s < chart.series.size(); ++s) {
    std::string path;
    std::string marks;
    for (const auto& [x, y] : chart.series[s].points) {
      if (!x_axis.Has(x) || !y_axis.Has(y)) continue;
      const double px = PlaceX(x_axis.At(x));
      const double py = PlaceY(y_axis.At(y));
      path += absl::StrFormat("%s%.1f,%.1f", path.empty() ? "" : " ", px, py);
      marks += absl::StrFormat(
          "<circle cx=\"%.1f\" cy=\"%.1f\" r=\"2.5\" fill=\"%s\"><title>%s: %.6g, "
          "%.4g</title></circle>\n",
          px, py, ColourOf(s), Escaped(chart.series[s].name), x, y);
    }
    svg += absl::StrFormat(
        "<polyline points=\"%s\" fill=\"none\" stroke=\"%s\" stroke-width=\"1.6\"/>\n", path,
        ColourOf(s));
    svg += marks;
  }
  *height = kTop + kPlotHeight + kBottom;
  return svg;
}

}  // namespace

std::string SvgOf(std::span<const Chart> charts) {
  std::string body;
  double total = 0.0;
  for (const Chart& chart : charts) {
    double height = 0.0;
    const std::string drawn =
        std::visit([&height](const auto& kind) { return Draw(kind, &height); }, chart);
    body += absl::StrFormat("<g transform=\"translate(0 %.1f)\">\n%s</g>\n", total, drawn);
    total += height;
  }
  return absl::StrFormat(
             "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 %.0f %.0f\" width=\"%.0f\" "
             "height=\"%.0f\" font-family=\"sans-serif\" font-size=\"11\" fill=\"#222222\">\n"
             "<rect width=\"100%%\" height=\"100%%\" fill=\"#ffffff\"/>\n",
             kWidth, total, kWidth, total) +
         body + "</svg>\n";
}

}  // namespace kvtier::ctl
